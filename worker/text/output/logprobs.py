"""Converts logprobs to OpenAI's form."""

from collections.abc import Callable
from typing import Any

from worker.outcomes import Logprobs

_LEAST = -9999.0  # OpenAI's value for an impossible token; JSON has no minus infinity


def entry(token: int, logprobs: Logprobs, bytes_of: Callable[[int], bytes]) -> dict[str, Any]:
    """Return one entry of a choice's `logprobs.content`.

    A token may be a part of a character: then `bytes` is exact, and `token` has replacement characters.
    """
    return {
        **_one(bytes_of(token), logprobs.token),
        "top_logprobs": [_one(bytes_of(other), logprob) for other, logprob in logprobs.top],
    }


def _one(spelled: bytes, logprob: float) -> dict[str, Any]:
    return {"token": spelled.decode(errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(spelled)}
