"""The format of a file: safetensors, with the model, the tokens and the layout in the metadata of its header.

Written and read here rather than by the safetensors package, since tensors are read into buffers of the caller, in
pieces, and have types that NumPy lacks. `safetensors` opens these files all the same. In an encrypted file each tensor
is the ciphertext with its tag, as bytes; the header holds the salt, and encrypted all that depends on the prompt."""

import base64
import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from worker.prefix_store.encryption import CALL_BYTES, TAG_BYTES, Encryption, FileCipher
from worker.prefix_store.names import VERSION, FileName

_FORMAT = "sluice-prefix"
_LENGTH = struct.Struct("<Q")
_NO_CHECKSUM = "0" * 8
# Bytes of one read or write: a checksum finds them in the processor's cache, and rates are held finely.
_COPY_BYTES = 1 << 20
_WILLNEED: int | None = getattr(os, "POSIX_FADV_WILLNEED", None)  # macOS has none
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write. `dtype`: as safetensors names it. `content`: returns its bytes in row-major order.
    Called on the writer's thread, it may compute them, each time, and raises OSError if that fails."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: Callable[[], memoryview | bytes]

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], data: memoryview | bytes) -> "Tensor":
        """Return a tensor of bytes in row-major order."""
        return cls(dtype, shape, len(data), lambda: data)


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """Content of one file: the KV of tokens `start` to `end` (exclusive) of a prefix, and the state after them."""

    namespace: str
    tokens: tuple[int, ...]  # start to end
    layout: str  # JSON: what the tensors are; the engine's own
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class BadFile(Exception):
    """The file is damaged, short, or not what its name says."""


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
    checksums: tuple[int, ...]  # empty if the file is encrypted: the tags replace them
    data_start: int  # byte of the file at which the tensors begin
    ends: tuple[int, ...]  # of each tensor, in bytes after `data_start`
    cipher: FileCipher | None = None  # None if the file is not encrypted


def encoded_size(name: FileName, segment: StoredSegment, encryption: Encryption | None = None) -> int:
    """Return the bytes of the file."""
    cipher = encryption.new_file(str(name)) if encryption else None
    tags = TAG_BYTES * len(segment.tensors) if cipher else 0
    return len(encode_header(name, segment, cipher, [0] * len(segment.tensors))) + segment.nbytes + tags


def encode_header(name: FileName, segment: StoredSegment, cipher: FileCipher | None, checksums: Sequence[int]) -> bytes:
    """Return the header. Its length does not depend on the checksums of the tensors; an encrypted file has none."""
    metadata: dict[str, str] = {
        "format": _FORMAT,
        "version": str(VERSION),
        "name": str(name),
        "header": _NO_CHECKSUM,
        **_content(segment, cipher, checksums),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for index, tensor in enumerate(segment.tensors):
        size = tensor.nbytes + (TAG_BYTES if cipher else 0)
        dtype, shape = ("U8", (size,)) if cipher else (tensor.dtype, tensor.shape)
        header[f"{index:06d}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    metadata["header"] = _checksum(header)
    encoded = json.dumps(header).encode()
    padded = encoded + b" " * (-len(encoded) % 8)
    return _LENGTH.pack(len(padded)) + padded


def _content(segment: StoredSegment, cipher: FileCipher | None, checksums: Sequence[int]) -> dict[str, str]:
    """Return what the header holds besides the format and the name: in plain form, or encrypted and with the salt."""
    content = {
        "namespace": segment.namespace,
        "tokens": json.dumps(_shortened(segment.tokens)),
        "layout": segment.layout,
        "created": f"{time.time():.3f}",
    }
    if cipher is None:
        return content | {"checksums": " ".join(f"{crc:08x}" for crc in checksums)}
    tensors = [(tensor.dtype, tensor.shape) for tensor in segment.tensors]
    encrypted = b"".join(cipher.encrypt(0, json.dumps({**content, "tensors": tensors}).encode()))
    return {"salt": cipher.salt.hex(), "encrypted": base64.b64encode(encrypted).decode()}


def _checksum(header: dict[str, Any]) -> str:
    blank = header | {"__metadata__": header["__metadata__"] | {"header": _NO_CHECKSUM}}
    return f"{zlib.crc32(json.dumps(blank, sort_keys=True).encode()):08x}"


def _shortened(tokens: Sequence[int]) -> list[int | list[int]]:
    """Return the tokens with repeated ones as [token, count]: an image is one large number, many times."""
    runs = ((token, sum(1 for _ in run)) for token, run in groupby(tokens))
    return [token if count == 1 else [token, count] for token, count in runs]


def _expanded(tokens: Sequence[int | list[int]]) -> tuple[int, ...]:
    if set(map(type, tokens)) == {int}:  # none is repeated: a fifth of the time
        return tuple(tokens)  # type: ignore[arg-type]
    expanded = list[int]()
    for token in tokens:
        expanded += [token] if isinstance(token, int) else [token[0]] * token[1]
    return tuple(expanded)


def read_header(file: BinaryIO, name: FileName, encryption: Encryption | None = None) -> Header:
    """Read and check the header of the file of this name. Raises `BadFile`, also for an encrypted file without its key
    and for one that is not encrypted with a key, and OSError."""
    size = os.fstat(file.fileno()).st_size
    first = file.read(_LENGTH.size)
    if len(first) < _LENGTH.size:
        raise BadFile("it is shorter than a header")
    (length,) = _LENGTH.unpack(first)
    if length > min(size, 64 << 20):
        raise BadFile("it is shorter than its header")
    try:
        header = _decoded(json.loads(file.read(length)), _LENGTH.size + length, name, encryption)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BadFile("its header cannot be read") from error
    if size != header.data_start + (header.ends[-1] if header.ends else 0):
        raise BadFile("it has another size than its header says")
    return header


def _decoded(raw: dict[str, Any], data_start: int, name: FileName, encryption: Encryption | None) -> Header:
    metadata = raw["__metadata__"]
    if metadata["format"] != _FORMAT or metadata["version"] != str(VERSION):
        raise BadFile("it is of another version")
    if metadata["header"] != _checksum(raw):
        raise BadFile("the checksum of its header differs")
    if metadata["name"] != str(name):
        raise BadFile("it has the content of another file")
    tensors = [raw[key] for key in sorted(raw) if key != "__metadata__"]
    cipher = _cipher(metadata, name, encryption)
    content = _decrypted(metadata, cipher) if cipher else metadata
    kinds = content["tensors"] if cipher else [(tensor["dtype"], tensor["shape"]) for tensor in tensors]
    checksums = () if cipher else tuple(int(crc, 16) for crc in metadata["checksums"].split())
    if len(kinds) != len(tensors) or (cipher is None and len(checksums) != len(tensors)):
        raise BadFile("checksums are missing")
    tokens = _expanded(json.loads(content["tokens"]))
    if len(tokens) != name.end - name.start:
        raise BadFile("it holds other tokens")
    return Header(
        name=name,
        namespace=content["namespace"],
        tokens=tokens,
        layout=content["layout"],
        created_s=float(content["created"]),
        dtypes=tuple(dtype for dtype, _ in kinds),
        shapes=tuple(tuple(shape) for _, shape in kinds),
        checksums=checksums,
        data_start=data_start,
        ends=tuple(tensor["data_offsets"][1] for tensor in tensors),
        cipher=cipher,
    )


def _cipher(metadata: dict[str, str], name: FileName, encryption: Encryption | None) -> FileCipher | None:
    """Return the cipher of a file; None if it is not encrypted, and has not to be."""
    if ("salt" in metadata) != (encryption is not None):
        raise BadFile("it is not encrypted" if encryption else "it is encrypted")
    return encryption.file(str(name), bytes.fromhex(metadata["salt"])) if encryption else None


def _decrypted(metadata: dict[str, str], cipher: FileCipher) -> dict[str, Any]:
    content = cipher.decrypt(0, base64.b64decode(metadata["encrypted"]))
    if content is None:
        raise BadFile("it is encrypted with another key, or damaged")
    decoded: dict[str, Any] = json.loads(content)
    return decoded


def read_file_header(path: Path, name: FileName, encryption: Encryption | None = None) -> Header:
    """Read and check the header of a file. Raises `BadFile`, OSError."""
    with path.open("rb", buffering=0) as file:
        return read_header(file, name, encryption)


OnRead = Callable[[int], object]


def write_segment(
    file: BinaryIO,
    name: FileName,
    segment: StoredSegment,
    encryption: Encryption | None = None,
    on_written: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Write a segment. `on_written`: called with the bytes of each piece, and may block. Raises OSError."""
    cipher = encryption.new_file(str(name)) if encryption else None
    blank = [0] * len(segment.tensors)
    file.write(encode_header(name, segment, cipher, blank))
    if cipher:
        for part, tensor in enumerate(segment.tensors):
            for piece in cipher.encrypt(_part_of(part), tensor.content()):
                file.write(piece)
                on_written(len(piece))
        return
    checksums = [_write_tensor(file, tensor, on_written) for tensor in segment.tensors]
    file.seek(0)  # the header has the same length with the checksums, so each byte was read once
    file.write(encode_header(name, segment, cipher, checksums))


def _write_tensor(file: BinaryIO, tensor: Tensor, on_written: Callable[[int], object]) -> int:
    """Write a tensor in pieces, and return its checksum. Python's lock is free during a piece."""
    data, crc = memoryview(tensor.content()), 0
    for at in range(0, len(data), _COPY_BYTES):
        piece = data[at : at + _COPY_BYTES]
        crc = zlib.crc32(piece, crc)
        file.write(piece)
        on_written(len(piece))
    return crc


def _part_of(tensor: int) -> int:
    """Return the number of a tensor among the encrypted parts of a file; that of the header is 0."""
    return tensor + 1


def will_need(file: BinaryIO, start: int, nbytes: int) -> bool:
    """Let the system begin to read a part of a file, without waiting for it. Returns False if it has no call for
    that. Raises OSError."""
    if _WILLNEED is None:
        return False
    os.posix_fadvise(file.fileno(), start, nbytes, _WILLNEED)
    return True


def read_tensors(
    file: BinaryIO,
    header: Header,
    allocate: Callable[[int], Callable[[], B]],
    checksums: Executor,
    on_read: OnRead = lambda nbytes: None,
    count: int | None = None,
) -> list[B]:
    """Read the first `count` tensors, or all, each into a buffer. `allocate(nbytes)` starts to allocate one, and
    returns a function that waits for it: the memory of the next tensor is touched for the first time while one is read,
    and the checksum of the one before is computed by `checksums`, since all three take about as long. `on_read`: called
    with the bytes of each piece, and may block. Raises `BadFile`, OSError."""
    tag = TAG_BYTES if header.cipher else 0
    ends = header.ends[:count]
    starts = (0, *ends[:-1])[: len(ends)]
    sizes = [end - start - tag for start, end in zip(starts, ends, strict=True)]
    if ends:
        will_need(file, 0, header.data_start + ends[-1])
    buffers, computed = list[B](), list[Future[int]]()
    for index, buffer in enumerate(_allocated_ahead(allocate, sizes)):
        view = memoryview(buffer).cast("B") if sizes[index] else memoryview(b"")  # type: ignore[arg-type]
        start = header.data_start + starts[index]
        if header.cipher:
            _read_encrypted(file, header.cipher, _part_of(index), view, start, on_read)
        else:
            _read_plain(file, view, start, on_read)
            computed.append(checksums.submit(zlib.crc32, view))
        buffers.append(buffer)
    if not all(crc.result() == right for crc, right in zip(computed, header.checksums[:count], strict=True)):
        raise BadFile("a checksum differs")
    return buffers


def _allocated_ahead(allocate: Callable[[int], Callable[[], B]], sizes: Iterable[int]) -> Iterator[B]:
    """Yield a buffer of each size. While the caller fills one, the next one is being allocated."""
    allocated: Callable[[], B] | None = None
    for size in sizes:
        following = allocate(size)
        if allocated is not None:
            yield allocated()
        allocated = following
    if allocated is not None:
        yield allocated()


def _read_plain(file: BinaryIO, view: memoryview, start: int, on_read: OnRead) -> None:
    for at in range(0, len(view), _COPY_BYTES):
        piece = view[at : at + _COPY_BYTES]
        _fill(file, piece, start + at)
        on_read(len(piece))


def _read_encrypted(
    file: BinaryIO, cipher: FileCipher, part: int, view: memoryview, start: int, on_read: OnRead
) -> None:
    decryption = cipher.decryption(part)
    for at in range(0, len(view), CALL_BYTES):
        piece = view[at : at + CALL_BYTES]
        _fill(file, piece, start + at)
        decryption.update(piece)
        on_read(len(piece))
    tag = bytearray(TAG_BYTES)
    _fill(file, memoryview(tag), start + len(view))
    if not decryption.verify(bytes(tag)):
        raise BadFile("it is encrypted with another key, or damaged")


def _fill(file: BinaryIO, view: memoryview, at: int) -> None:
    while view:
        count = os.preadv(file.fileno(), [view], at)
        if count == 0:
            raise BadFile("it is too short")
        view = view[count:]
        at += count
