"""Measured costs of forwards, interpolated between the measured shapes."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from math import prod

from worker.engine.step.tuning import MAX_CHUNK

Shape = tuple[int, int]  # (rows, tokens of each row)


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at `at` on the line through the points (x, y), ascending in x. Outside of them the line through
    the nearest two continues."""
    index = min(max(bisect_right([x for x, _ in points], at), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1 : index + 1]
    return y0 + (at - x0) * (y1 - y0) / (x1 - x0)


@dataclass(frozen=True)
class Overheads:
    """Seconds that the engine takes in addition to the forwards."""

    step_s: float  # of each step: tokens to outcomes, the report
    chunk_s: float  # of each prompt in a prefill forward: the prefix cache
    join_s: float  # of each row that joins the decoding rows: its cache is copied


@dataclass(frozen=True)
class Costs:
    """A model's costs. A number of rows that is measured at all is measured at two lengths at least."""

    measured_ms: Mapping[Shape, float]
    overheads: Overheads
    padded: bool = False  # prompts can share a forward in which they compute different numbers of tokens

    def forward_s(self, rows: int, tokens: int) -> float:
        """Return the seconds of a forward of `tokens` tokens in each of `rows` rows."""
        measured_rows = sorted({each for each, _ in self.measured_ms})
        by_rows = [(float(each), interpolated(self._by_tokens(each), tokens)) for each in measured_rows]
        return interpolated(by_rows, rows) / 1000

    @cached_property
    def cheapest_s(self) -> float:
        """Seconds of a prompt's token in the cheapest forward of at most `MAX_CHUNK` tokens."""
        rows = range(1, max(rows for rows, _ in self.measured_ms) + 1)
        lengths = {tokens for _, tokens in self.measured_ms}
        shapes = [(each, tokens) for each in rows for tokens in {*lengths, MAX_CHUNK // each}]
        return min(self.forward_s(*shape) / prod(shape) for shape in shapes if prod(shape) <= MAX_CHUNK)

    def slower(self, factor: float) -> "Costs":
        """Return the costs of a machine on which everything takes `factor` times as long."""
        overheads = Overheads(*(factor * seconds for seconds in astuple(self.overheads)))
        return Costs({shape: factor * ms for shape, ms in self.measured_ms.items()}, overheads, self.padded)

    def _by_tokens(self, rows: int) -> list[tuple[float, float]]:
        return sorted((float(tokens), ms) for (each, tokens), ms in self.measured_ms.items() if each == rows)

    def alone_s(self, prompt: int) -> float:
        """Return the seconds until the first token of a prompt that has the device to itself, without overheads."""
        return self.forward_s(1, max(1, prompt - 1)) + self.forward_s(1, 1)

    def capacity(self, prompt: float, answer: float) -> float:
        """Return the requests per second for which the bare forwards need all of the time: prompts packed as 8 × 16
        tokens, and 32 rows decoding. `prompt` and `answer`: mean tokens."""
        return 1 / (prompt * self.forward_s(8, 16) / (8 * 16) + answer * self.forward_s(32, 1) / 32)


# Forwards of mlx-lm's models without a scheduler, in ms: 2 CPU cores (AMD EPYC), fp32, OpenBLAS with one thread. The
# overheads are those with which the simulation of the worker before packing agrees with its measured bursts.
PLAIN = Costs(
    {
        (1, 1): 37,
        (1, 16): 64,
        (1, 64): 170,
        (1, 256): 640,
        (8, 1): 53,
        (8, 16): 289,
        (32, 1): 137,
        (32, 16): 1118,
    },
    Overheads(step_s=0.004, chunk_s=0.008, join_s=0.012),
    padded=True,
)
HYBRID = Costs(
    {
        (1, 1): 15,
        (1, 16): 34,
        (1, 64): 113,
        (1, 256): 438,
        (8, 1): 21,
        (8, 16): 194,
        (32, 1): 55,
        (32, 16): 755,
    },
    Overheads(step_s=0.006, chunk_s=0.015, join_s=0.020),
)
# `scripts/bench serve --model large`, 1.4 billion parameters in bfloat16, on an NVIDIA H200 (mlx 0.32.4, CUDA 13). Not
# measured, but assumed: 2,048 tokens, by the measured rate of large products; 8 x 64, as 32 x 16; and all overheads. Up
# to 512 tokens a forward costs about the same, so nothing is gained by short chunks, and much by few forwards.
GPU = Costs(
    {
        (1, 1): 4.3,
        (1, 16): 14.6,
        (1, 64): 13.8,
        (1, 256): 12.4,
        (1, 2048): 25,
        (8, 1): 11.2,
        (8, 16): 14.9,
        (8, 64): 15.2,
        (32, 1): 11.1,
        (32, 16): 15.2,
    },
    Overheads(step_s=0.001, chunk_s=0.002, join_s=0.002),
    padded=True,
)
MODELS = {"plain": PLAIN, "hybrid": HYBRID, "gpu": GPU}
