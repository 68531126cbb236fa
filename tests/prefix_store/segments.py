"""Segments with content that follows from their tokens, so that a wrong byte is found without a second copy."""

import hashlib
import time
from contextlib import suppress
from pathlib import Path

from worker.prefix_store.format import StoredSegment, Tensor
from worker.prefix_store.index import Chain
from worker.prefix_store.reader import LoadedSegment
from worker.prefix_store.store import PrefixStore, StoreOptions
from worker.prefix_store.writer import NewSegment

MODEL = "a model"


def content(path: tuple[int, ...], size: int) -> bytes:
    """Return bytes that follow from all tokens up to the end of a segment."""
    seed = hashlib.sha256(repr(path).encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


def segment(
    path: tuple[int, ...], start: int = 0, *, state: bool = False, size: int = 4096, namespace: str = ""
) -> NewSegment:
    """Return the segment of tokens `start` to the end of the path."""
    half = content(path, size)
    tensors = (
        Tensor.of("U8", (size,), memoryview(half)),
        Tensor.of("BF16", (2, size // 4), memoryview(half)),
        Tensor.of("F32", (0,), b""),
    )
    return NewSegment(path, state, StoredSegment(namespace, path[start:], '{"kind": "test"}', tensors))


def store(
    folder: Path,
    *,
    model: str = MODEL,
    max_bytes: int = 10_000_000,
    daily: int | None = None,
    pending: int = 1 << 30,
    key: bytes | None = None,
) -> PrefixStore:
    """Return an open store."""
    opened = PrefixStore(StoreOptions(folder, max_bytes, daily, pending, key), model)
    opened.open()
    return opened


def written(folder: Path, *segments: NewSegment, **options: object) -> None:
    """Write segments and close the store."""
    opened = store(folder, **options)  # type: ignore[arg-type]
    for each in segments:
        assert opened.writer.write(each)
    opened.close(60)


def read(opened: PrefixStore, chain: Chain | None) -> tuple[LoadedSegment, ...]:
    """Return the segments of a chain, once they are read."""
    assert chain is not None
    reading = opened.reader.read(chain)
    until = time.monotonic() + 30
    while not reading.done:
        assert time.monotonic() < until
        time.sleep(0.001)
    return reading.segments


def assert_right(chain: Chain, segments: tuple[LoadedSegment, ...]) -> None:
    """Assert that each segment has exactly the bytes that were written for its tokens."""
    for name, each in zip(chain.files, segments, strict=False):
        expected = content(chain.tokens[: name.end], len(each.arrays[0]))
        assert [bytes(buffer) for buffer in each.arrays] == [expected, expected, b""]


def nbytes(folder: Path) -> int:
    """Return the bytes of all files of the folder. A file may be removed meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def files(folder: Path) -> list[Path]:
    """Return the files of segments."""
    return sorted(folder.glob("sluice-prefix-v*.safetensors"))
