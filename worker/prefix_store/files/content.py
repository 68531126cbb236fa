"""The tensors of a file: written in pieces, and read into buffers of the caller."""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import BinaryIO, TypeVar

from worker.prefix_store.files.encryption import CALL_BYTES, TAG_BYTES, Encryption, PartDecryption
from worker.prefix_store.files.header import BadFile, Header, encode_header
from worker.prefix_store.files.names import FileName
from worker.prefix_store.files.segment import StoredSegment, Tensor

# Bytes of one read or write: a checksum finds them in the processor's cache, and rates are held finely.
_COPY_BYTES = 1 << 20
_WILLNEED: int | None = getattr(os, "POSIX_FADV_WILLNEED", None)  # macOS has none

B = TypeVar("B")
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
            _read_encrypted(file, header.cipher.decryption(_part_of(index)), view, start, on_read)
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


def _read_encrypted(file: BinaryIO, decryption: PartDecryption, view: memoryview, start: int, on_read: OnRead) -> None:
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
