"""Reads the fields of a chat completion that the gateway handles itself, and makes the request of each choice."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice.gateway.errors import ApiError
from sluice.gateway.fields import flag, refusal
from sluice.gateway.tools import RequestTools, read_chat_tools
from sluice.http_errors import ErrorForm
from sluice.openai import wants_usage

ID_PREFIX = "chatcmpl-"
MAX_CHOICES = 128  # OpenAI's
_SEVERAL = re.compile(rf"{ID_PREFIX}[0-9a-f]{{32}}-n(\d{{1,3}})")


@dataclass(frozen=True, slots=True)
class ChatFields:
    """The fields of a request that the gateway handles itself. `body` is the request of one choice, without `n`."""

    body: dict[str, Any]
    choices: int
    stream: bool
    include_usage: bool
    tools: RequestTools

    def choice(self, index: int) -> dict[str, Any]:
        """Return the request of a choice: with a seed of its own, if the request has one."""
        seed = self.body.get("seed")
        if index == 0 or type(seed) is not int:
            return self.body
        return {**self.body, "seed": _derived(seed, index)}


def read_request(body: Mapping[str, Any], length: int, max_bytes: int) -> ChatFields:
    """Read a request whose body has `length` bytes. Raises `ApiError`; the worker checks all other fields."""
    choices = 1 if body.get("n") is None else body["n"]
    if type(choices) is not int or not 1 <= choices <= MAX_CHOICES:
        raise refusal("n", f"it must be a whole number from 1 to {MAX_CHOICES}.")
    if choices > 1 and choices * length > max_bytes:
        message = f"n: {choices} choices of a body of {length:,} bytes exceed {max_bytes:,} bytes; ask for fewer."
        raise ApiError(ErrorForm.BODY_TOO_LARGE, message, param="n")
    stream = flag(body.get("stream"), "stream", False)
    one, tools = read_chat_tools({name: value for name, value in body.items() if name != "n"})
    return ChatFields(one, choices, stream, wants_usage(body), tools)


def _derived(seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def job_ids(base: str, choices: int) -> list[str]:
    """Return the ids of the choices' jobs, all of which follow from the first: `base`, or `base-n3`, `base-n3.1`, …"""
    if choices == 1:
        return [base]
    first = f"{base}-n{choices}"
    return [first, *(f"{first}.{index}" for index in range(1, choices))]


def job_ids_of(first: str) -> list[str]:
    """Return the ids of the jobs of an answer, from the id of the first one."""
    several = _SEVERAL.fullmatch(first)
    return job_ids(first.rpartition("-n")[0], int(several[1])) if several else [first]
