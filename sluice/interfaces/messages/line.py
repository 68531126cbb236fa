"""A request for a message without HTTP: a line of a batch."""

from collections.abc import Mapping
from typing import Any

from sluice.interfaces.completion import events_of
from sluice.interfaces.messages import committed
from sluice.interfaces.messages.request import read_message
from sluice.interfaces.messages.stream import MessageStream, whole_message


def as_job(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contract's request for a body. Raises `ApiError`."""
    read, _ = committed.messages(dict(body))
    return read_message(read)[1]


def answer(body: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message for the result of the body's job."""
    read, ignored = committed.messages(dict(body))
    stream = MessageStream(omit_thinking=read_message(read)[0].omits_thinking, ignored=ignored)
    return whole_message(each for event in events_of(completion) for each in stream.events(event))
