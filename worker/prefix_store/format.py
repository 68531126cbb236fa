"""The format of a file: safetensors, with a header that says what the tensors are the cache of.

Written and read here rather than by the safetensors package, since tensors are read into buffers of the caller, and
have types that NumPy lacks. `safetensors` opens these files all the same."""

import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from worker.prefix_store.names import VERSION, FileName

_FORMAT = "sluice-prefix"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 64 << 20
_NO_CHECKSUM = "0" * 8
_READ = 16 << 20  # bytes of one read

B = TypeVar("B")


class BadFile(Exception):
    """The file is damaged, short, or not what its name says."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's bytes in row-major order. `dtype`: as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes


@dataclass(frozen=True, slots=True)
class Place:
    """What one file holds: the KV of tokens `start` to `end` (exclusive) of a prefix, and the state after them."""

    namespace: str
    tokens: tuple[int, ...]  # start to end
    layout: str  # JSON: what the tensors are; the engine's own
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(len(tensor.data) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file."""

    name: FileName
    namespace: str
    tokens: tuple[int, ...]
    layout: str
    created_s: float
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    checksums: tuple[int, ...]
    data_start: int  # byte of the file at which the tensors begin
    ends: tuple[int, ...]  # of each tensor, in bytes after `data_start`


def write_place(file: BinaryIO, name: FileName, place: Place) -> None:
    """Write a place. Raises OSError."""
    file.write(_encode_header(name, place))
    for tensor in place.tensors:
        file.write(tensor.data)


def encoded_size(name: FileName, place: Place) -> int:
    """Return the bytes of the file."""
    return len(_encode_header(name, place, checked=False)) + place.nbytes


def _encode_header(name: FileName, place: Place, *, checked: bool = True) -> bytes:
    """Return the header. `checked`: with checksums; without them it has the same length."""
    crcs = [zlib.crc32(tensor.data) if checked else 0 for tensor in place.tensors]
    metadata = {
        "format": _FORMAT,
        "version": str(VERSION),
        "name": str(name),
        "namespace": place.namespace,
        "tokens": json.dumps(_shortened(place.tokens)),
        "layout": place.layout,
        "created": f"{time.time():.3f}",
        "checksums": " ".join(f"{crc:08x}" for crc in crcs),
        "header": _NO_CHECKSUM,
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for index, tensor in enumerate(place.tensors):
        end = at + len(tensor.data)
        header[f"{index:06d}"] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    if checked:
        metadata["header"] = _checksum(header)
    encoded = json.dumps(header).encode()
    padded = encoded + b" " * (-len(encoded) % 8)
    return _LENGTH.pack(len(padded)) + padded


def _checksum(header: dict[str, Any]) -> str:
    blank = header | {"__metadata__": header["__metadata__"] | {"header": _NO_CHECKSUM}}
    return f"{zlib.crc32(json.dumps(blank, sort_keys=True).encode()):08x}"


def _shortened(tokens: Sequence[int]) -> list[int | list[int]]:
    """Return the tokens with repeated ones as [token, count]: an image is one large number, many times."""
    runs = ((token, sum(1 for _ in run)) for token, run in groupby(tokens))
    return [token if count == 1 else [token, count] for token, count in runs]


def _expanded(tokens: Sequence[int | list[int]]) -> tuple[int, ...]:
    expanded = list[int]()
    for token in tokens:
        expanded += [token] if isinstance(token, int) else [token[0]] * token[1]
    return tuple(expanded)


def read_header(file: BinaryIO, name: FileName) -> Header:
    """Read and check the header of the file of this name. Raises `BadFile`, OSError."""
    size = os.fstat(file.fileno()).st_size
    first = file.read(_LENGTH.size)
    if len(first) < _LENGTH.size:
        raise BadFile("it is shorter than a header")
    (length,) = _LENGTH.unpack(first)
    if length > min(size, _MAX_HEADER):
        raise BadFile("it is shorter than its header")
    try:
        header = _decoded(json.loads(file.read(length)), _LENGTH.size + length, name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BadFile("its header cannot be read") from error
    if size != header.data_start + (header.ends[-1] if header.ends else 0):
        raise BadFile("it has another size than its header says")
    return header


def _decoded(raw: dict[str, Any], data_start: int, name: FileName) -> Header:
    metadata = raw["__metadata__"]
    if metadata["format"] != _FORMAT or metadata["version"] != str(VERSION):
        raise BadFile("it is of another version")
    if metadata["header"] != _checksum(raw):
        raise BadFile("the checksum of its header differs")
    if metadata["name"] != str(name):
        raise BadFile("it has the content of another file")
    tensors = [raw[key] for key in sorted(raw) if key != "__metadata__"]
    checksums = tuple(int(crc, 16) for crc in metadata["checksums"].split())
    if len(checksums) != len(tensors):
        raise BadFile("checksums are missing")
    return Header(
        name=name,
        namespace=metadata["namespace"],
        tokens=_expanded(json.loads(metadata["tokens"])),
        layout=metadata["layout"],
        created_s=float(metadata["created"]),
        dtypes=tuple(tensor["dtype"] for tensor in tensors),
        shapes=tuple(tuple(tensor["shape"]) for tensor in tensors),
        checksums=checksums,
        data_start=data_start,
        ends=tuple(tensor["data_offsets"][1] for tensor in tensors),
    )


def read_tensors(file: BinaryIO, header: Header, allocate: Callable[[int], B]) -> list[B]:
    """Read the tensors, each into a buffer that `allocate(nbytes)` returns. Raises `BadFile`, OSError."""
    buffers = list[B]()
    at = 0
    for end, checksum in zip(header.ends, header.checksums, strict=True):
        buffer = allocate(end - at)
        view = memoryview(buffer).cast("B") if end > at else memoryview(b"")  # type: ignore[arg-type]
        crc = 0
        for part in range(0, end - at, _READ):
            piece = view[part : part + _READ]
            _fill(file, piece, header.data_start + at + part)
            crc = zlib.crc32(piece, crc)
        if crc != checksum:
            raise BadFile("a checksum differs")
        buffers.append(buffer)
        at = end
    return buffers


def _fill(file: BinaryIO, view: memoryview, at: int) -> None:
    while view:
        count = os.preadv(file.fileno(), [view], at)
        if count == 0:
            raise BadFile("it is too short")
        view = view[count:]
        at += count


def read_file_header(path: Path, name: FileName) -> Header:
    """Read and check the header of a file. Raises `BadFile`, OSError."""
    with path.open("rb", buffering=0) as file:
        return read_header(file, name)
