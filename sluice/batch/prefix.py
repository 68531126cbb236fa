"""Which lines begin alike: a worker computes what they share once, if they come to it one after the other."""

import json
import zlib
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

# A short shared instruction is told apart finely and a long shared document cheaply: characters, 74,752 in all.
_BLOCKS = tuple(chain(repeat(64, 16), repeat(512, 16), repeat(4096, 16)))


def prefix_key(body: dict[str, Any]) -> bytes:
    """Sorts lines with a common beginning next to each other. Raises ValueError where the body is none that JSON can
    hold: 1e999 reads as infinity."""
    first = {"tools": body.get("tools"), "messages": body["messages"]}
    text = json.dumps({**first, **body}, separators=(",", ":"), allow_nan=False).encode()
    return b"".join(zlib.crc32(block).to_bytes(4) for block in _blocks(text))


def _blocks(text: bytes) -> Iterator[bytes]:
    start = 0
    for size in _BLOCKS:
        if start >= len(text):
            return
        yield text[start : start + size]
        start += size
