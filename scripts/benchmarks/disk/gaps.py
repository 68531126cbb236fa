"""Gaps between the tokens of running rows while prefixes are written and read."""

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from scripts.benchmarks.disk.figures import Figure, at_most
from scripts.benchmarks.engine import prompt
from worker.engine.engine import Engine
from worker.engine.model.load import Model
from worker.engine.prefix.disk import store_of
from worker.engine.prefix.tensors import exact_tensor, group_size, quantized_tensors
from worker.prefix_store.files.segment import StoredSegment, Tensor
from worker.prefix_store.reader import Reading
from worker.prefix_store.store import PrefixStore, StoreOptions
from worker.prefix_store.writer import NewSegment
from worker.schedule.request import GenerationRequest

MAX_GAPS = 1.25
ROWS = 4
# A segment of a model with eight KV layers: keys and values of eight heads of 128 numbers of 16 bits.
TENSORS = 16
TOKEN_BYTES = 8 * 128 * 2  # of a tensor
SEGMENT_TOKENS = 1024
_PHASES = 16  # of traffic, each with as many quiet steps after it
_MOST_TOKENS = 8000  # of an answer: more than rows decode meanwhile


def figures(model: Model, folder: Path, nbytes: int, bits: int | None = None) -> Iterator[Figure]:
    """Compare steps beside traffic with those between: prefixes of `nbytes` in all are written and read in portions,
    and after each the rows decode as many steps without it. `bits`: of a value on disk, 8; None: it is exact."""
    engine = Engine(model, step_s=1.0, prefix_bytes=0)
    for row in range(ROWS):
        engine.add(GenerationRequest(f"running {row}", prompt(32, row), _MOST_TOKENS))
    for _ in range(20):
        engine.step()
    busy, quiet = list[float](), list[float]()
    traffic = Traffic(folder, bits)
    segments = max(_PHASES, nbytes // traffic.segment_bytes)
    for phase in range(_PHASES):
        traffic.begin(segments * (phase + 1) // _PHASES - segments * phase // _PHASES)
        steps = len(busy)
        while traffic.advance():
            busy.append(_step_s(engine))
        quiet += [_step_s(engine) for _ in range(len(busy) - steps)]
    traffic.close()
    if len(engine) < ROWS:
        raise RuntimeError("rows have ended meanwhile; the measurement is void: give fewer --gigabytes")
    engine.close()
    p99_busy, p99_quiet = (_percentile(each, 99) for each in (busy, quiet))
    medians = f"medians {1000 * statistics.median(busy):.1f} and {1000 * statistics.median(quiet):.1f} ms"
    detail = f" ({1000 * p99_busy:.1f} and {1000 * p99_quiet:.1f} ms, {medians}, {len(busy):,} steps each)"
    kind = f" of KV with {bits} bits" if bits else ""
    yield at_most(
        f"gap p99 of {ROWS} rows while {traffic.nbytes / 1e9:.1f} GB{kind} are written and read, against without",
        p99_busy / p99_quiet,
        MAX_GAPS,
        detail,
    )


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def _step_s(engine: Engine) -> float:
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


class Traffic:
    """Segments that are written and then read, as evictions and loads do it."""

    def __init__(self, folder: Path, bits: int | None) -> None:
        self._store: PrefixStore = store_of(StoreOptions(folder, 1 << 50), "traffic", lambda: None)
        self._store.open()
        self._store.limit_reads(decoding=True)
        self._bits = bits
        self.segment_bytes = TENSORS * TOKEN_BYTES * SEGMENT_TOKENS  # in memory
        self._keys = mx.random.normal((1, 8, SEGMENT_TOKENS, 128)).astype(mx.bfloat16)
        mx.eval(self._keys)
        self._written = 0  # segments
        self._read = 0
        self._end = 0  # of this portion
        self._reading: Reading | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that were read, and so also written, as they are in memory."""
        return self._read * self.segment_bytes

    def begin(self, segments: int) -> None:
        """Begin a portion of so many segments."""
        self._end += segments

    def advance(self) -> bool:
        """Hand over the next segment if there is room, and begin to read another if none is read. Returns False once
        the whole portion is read."""
        if self._written < self._end and self._store.write(self._segment(self._written)):
            self._written += 1
        if self._reading is not None and self._reading.done:
            if not self._reading.segments:
                raise RuntimeError("a segment cannot be read; the measurement is void")
            self._read += 1
            self._reading = None
        if self._reading is None and self._read < self._written:
            chain = self._store.find("", (self._read,), stateful=False)
            self._reading = self._store.read(chain) if chain else None
        return self._read < self._end

    def close(self) -> None:
        """End the store's threads."""
        self._store.close(60)

    def _segment(self, number: int) -> NewSegment:
        """Return a segment whose keys and values are all alike."""
        size = group_size(self._keys) if self._bits else None
        tensors = list[Tensor]()
        for _ in range(TENSORS):
            tensors += quantized_tensors(self._keys, size) if size else [exact_tensor(self._keys)]
        layout = json.dumps({"buffers": TENSORS, "group_sizes": [size] * TENSORS})
        return NewSegment((number,), False, StoredSegment("", (number,), layout, tuple(tensors)))
