"""Places with content that follows from their tokens, so that a wrong byte is found without a second copy."""

import hashlib
import time
from pathlib import Path

from worker.prefix_store.format import Place, Tensor
from worker.prefix_store.index import Chain
from worker.prefix_store.reader import ReadPlace
from worker.prefix_store.store import PrefixStore, StoreOptions
from worker.prefix_store.writer import NewPlace

MODEL = "a model"


def content(path: tuple[int, ...], size: int) -> bytes:
    """Return bytes that follow from all tokens up to the end of a place."""
    seed = hashlib.sha256(repr(path).encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


def place(
    path: tuple[int, ...], start: int = 0, *, state: bool = False, size: int = 4096, namespace: str = ""
) -> NewPlace:
    """Return the place of tokens `start` to the end of the path."""
    half = content(path, size)
    tensors = (
        Tensor("U8", (size,), memoryview(half)),
        Tensor("BF16", (2, size // 4), memoryview(half)),
        Tensor("F32", (0,), b""),
    )
    return NewPlace(path, state, Place(namespace, path[start:], '{"kind": "test"}', tensors))


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


def written(folder: Path, *places: NewPlace, **options: object) -> None:
    """Write places and close the store."""
    opened = store(folder, **options)  # type: ignore[arg-type]
    for each in places:
        assert opened.write(each)
    opened.close(60)


def read(opened: PrefixStore, chain: Chain | None) -> tuple[ReadPlace, ...]:
    """Return the places of a chain, once they are read."""
    assert chain is not None
    reading = opened.read(chain)
    until = time.monotonic() + 30
    while not reading.done:
        assert time.monotonic() < until
        time.sleep(0.001)
    return reading.places


def assert_right(chain: Chain, places: tuple[ReadPlace, ...]) -> None:
    """Assert that each place has exactly the bytes that were written for its tokens."""
    for name, each in zip(chain.files, places, strict=False):
        expected = content(chain.tokens[: name.end], len(each.buffers[0]))
        assert [bytes(buffer) for buffer in each.buffers] == [expected, expected, b""]


def nbytes(folder: Path) -> int:
    """Return the bytes of all files of the folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def files(folder: Path) -> list[Path]:
    """Return the files of places."""
    return sorted(folder.glob("sluice-prefix-v*.safetensors"))
