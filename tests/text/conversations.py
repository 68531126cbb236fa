"""Conversations as clients send them, of any form."""

import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from hypothesis import strategies as st
from pydantic import TypeAdapter

from schemas.messages import Message

Said = dict[str, Any]

_MESSAGES = TypeAdapter(list[Message])
_KINDS = st.sampled_from(["system", "developer", "user", "assistant", "call", "tool"])
_IDS = st.sampled_from(["call_1", "call_2", "call_3"])


def read(said: list[Said]) -> list[Message]:
    return _MESSAGES.validate_python(said)


def system(content: Any) -> Said:
    return {"role": "system", "content": content}


def developer(content: Any) -> Said:
    return {"role": "developer", "content": content}


def user(content: Any, **fields: Any) -> Said:
    return {"role": "user", "content": content, **fields}


def assistant(content: Any, **fields: Any) -> Said:
    return {"role": "assistant", "content": content, **fields}


def call(id: str, arguments: Any = "{}", name: str = "look") -> Said:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Said, content: Any = None, **fields: Any) -> Said:
    return assistant(content, tool_calls=list(calls), **fields)


def result(id: str, content: Any) -> Said:
    return {"role": "tool", "tool_call_id": id, "content": content}


def text(words: str) -> Said:
    return {"type": "text", "text": words}


def image(name: str) -> Said:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


def numbered() -> Iterator[str]:
    """Words none of which is within another."""
    return (f"w{number}." for number in count())


@st.composite
def unique(draw: st.DrawFn) -> list[Said]:
    """No word and no image comes twice."""
    numbers = numbered()

    def words() -> str:
        return " ".join(next(numbers) for _ in range(draw(st.integers(0, 2))))

    return draw(conversations(words, lambda: image(next(numbers))))


@st.composite
def conversations(draw: st.DrawFn, words: Callable[[], str], picture: Callable[[], Said] | None = None) -> list[Said]:
    """One to eight messages, in any order."""

    def content(*, pictures: bool = False) -> Any:
        if draw(st.booleans()):
            return words()
        kinds = draw(st.lists(st.booleans(), max_size=3))
        return [picture() if pictures and picture and each else text(words()) for each in kinds]

    def maybe(**fields: Callable[[], Any]) -> Said:
        return {name: make() for name, make in fields.items() if draw(st.booleans())}

    def arguments() -> str:
        return json.dumps({"about": words()}) if draw(st.booleans()) else words()

    def message(kind: str) -> Said:
        name = {"name": lambda: draw(st.sampled_from(["ada", "bob"]))}
        match kind:
            case "user":
                return user(content(pictures=True), **maybe(**name))
            case "assistant":
                return assistant(content(), **maybe(reasoning=words, refusal=words))
            case "call":
                ids = draw(st.lists(_IDS, min_size=1, max_size=3, unique=True))
                calls = [call(id, arguments()) for id in ids]
                return calling(*calls, **maybe(content=content, reasoning_content=words))
            case "tool":
                return result(draw(_IDS), content())
        return {"role": kind, "content": content(), **maybe(**name)}

    return [message(kind) for kind in draw(st.lists(_KINDS, min_size=1, max_size=8))]
