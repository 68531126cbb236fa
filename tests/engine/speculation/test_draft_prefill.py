"""A draft model computes no more of a prompt in a step than there is time for."""

from math import inf

import pytest

from worker.engine.speculation.draft_model import PrefillChunks
from worker.engine.speculation.tuning import MAX_PREFILL
from worker.engine.step.tuning import MIN_CHUNK


class Device:
    """Computes chunks as there is time, in simulated seconds."""

    def __init__(self, pass_s: float, token_s: float) -> None:
        self.chunks, self.pass_s, self.token_s = PrefillChunks(), pass_s, token_s

    def seconds(self, tokens: int) -> float:
        return self.pass_s + tokens * self.token_s

    def compute(self, within_s: float) -> int:
        """Compute a chunk, and return its tokens."""
        tokens = self.chunks.next_chunk(within_s)
        if tokens:
            self.chunks.observe(tokens, self.seconds(tokens))
        return tokens


def test_without_a_limit_a_chunk_is_as_long_as_memory_allows() -> None:
    assert Device(0.01, 0.001).compute(inf) == MAX_PREFILL


def test_nothing_is_computed_without_time() -> None:
    device = Device(0.01, 0.001)
    assert (device.compute(0.0), device.compute(-1.0)) == (0, 0)


@pytest.mark.parametrize(("pass_s", "token_s"), [(0.02, 0.001), (0.001, 0.001), (0.05, 0.000_1)])
def test_chunks_grow_to_what_takes_the_time_and_take_no_more(pass_s: float, token_s: float) -> None:
    device, limit_s = Device(pass_s, token_s), 0.1
    chunks = [device.compute(limit_s) for _ in range(30)]
    assert chunks[0] == MIN_CHUNK
    assert all(device.seconds(tokens) <= 1.1 * limit_s for tokens in chunks)
    fitting = min(MAX_PREFILL, (limit_s - pass_s) / token_s)
    assert chunks[-1] >= 0.8 * fitting


def test_chunks_become_shorter_as_rows_grow_longer() -> None:
    device = Device(0.01, 0.001)
    for _ in range(30):
        device.compute(0.1)
    before = device.compute(0.1)
    device.token_s *= 2
    chunks = [device.compute(0.1) for _ in range(20)]
    assert device.seconds(chunks[-1]) <= 0.11
    assert MIN_CHUNK <= chunks[-1] < before


def test_one_slow_chunk_does_not_end_all_prefill() -> None:
    device = Device(0.01, 0.001)
    device.chunks.observe(MIN_CHUNK, 3.0)
    chunks = [device.compute(0.1) for _ in range(40)]
    assert chunks[0] == 0
    assert device.seconds(chunks[-1]) > 0.05


def test_prefill_that_is_always_too_slow_is_tried_rarely() -> None:
    device = Device(1.0, 0.001)
    chunks = [device.compute(0.1) for _ in range(50)]
    assert 0 < sum(tokens > 0 for tokens in chunks) <= 4
    assert set(chunks) <= {0, MIN_CHUNK}
