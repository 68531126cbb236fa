"""The start of a worker whose folder is full of other programs' files."""

import time
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.disk.figures import Figure, at_most
from worker.prefix_store.files.segment import StoredSegment, Tensor
from worker.prefix_store.store import PrefixStore, StoreOptions
from worker.prefix_store.writer import NewSegment

MAX_START_S = 1.0
FOREIGN_FILES = 10_000
_FOREIGN_BYTES = 100
_SEGMENT_BYTES = 10_000


def figures(folder: Path, foreign_files: int = FOREIGN_FILES) -> Iterator[Figure]:
    """Measure a start, and the quota that foreign files leave: two of ten segments fit beside them."""
    folder.mkdir(parents=True)
    for number in range(foreign_files):
        (folder / f"{number}.bin").write_bytes(bytes(_FOREIGN_BYTES))
    quota = foreign_files * _FOREIGN_BYTES + 3 * _SEGMENT_BYTES
    store = PrefixStore(StoreOptions(folder, quota), "start")
    began = time.perf_counter()
    store.open()
    took_s = time.perf_counter() - began
    yield at_most(f"seconds of a start with {foreign_files:,} foreign files in the folder", took_s, MAX_START_S)
    for number in range(10):
        store.write(
            NewSegment(
                (number,),
                False,
                StoredSegment("", (number,), "{}", (Tensor("U8", (_SEGMENT_BYTES,), bytes(_SEGMENT_BYTES)),)),
            )
        )
    store.close(60)
    left = sum(file.stat().st_size for file in folder.iterdir())
    foreign = sum(1 for _ in folder.glob("*.bin"))
    yield Figure(
        "  bytes in the folder after more was written, against the quota",
        left / quota,
        f"{left / quota:.3f}, {foreign_files - foreign} foreign files removed",
        "≤ 1",
        left <= quota and foreign == foreign_files,
    )
