"""Embeddings in OpenAI's form. The result of a job has base64, and numbers are made of it for clients."""

import base64
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any


def in_base64(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request of the contract for a body: numbers are asked for as base64."""
    return {**body, "encoding_format": "base64"} if wants_numbers(body) else dict(body)


def wants_numbers(body: Mapping[str, Any]) -> bool:
    """Return True if the embeddings are to be lists of numbers."""
    return body.get("encoding_format") in (None, "float")


def with_numbers(result: Mapping[str, Any]) -> bytes:
    """Return the result as JSON with numbers. An entry at a time: other threads run between them."""
    entries = [
        json.dumps({**entry, "embedding": vector}, separators=(",", ":"))
        for entry, vector in zip(result["data"], vectors_of(result), strict=True)
    ]
    rest = json.dumps({name: value for name, value in result.items() if name != "data"}, separators=(",", ":"))
    return f'{rest[:-1]},"data":[{",".join(entries)}]}}'.encode()


def vectors_of(result: Mapping[str, Any]) -> Iterator[list[float]]:
    """Yield the vectors in the result of a job of an embedding model that was asked for base64."""
    for entry in result["data"]:
        vector = base64.b64decode(entry["embedding"])
        yield [*struct.unpack(f"<{len(vector) // 4}f", vector)]
