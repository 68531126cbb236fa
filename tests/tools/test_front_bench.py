"""What `scripts/bench gateway` computes and reads."""

import json
import os

import pytest

from scripts.benchmarks.front.burst import Burst, Case, Measured
from scripts.benchmarks.front.command import _verdicts
from scripts.benchmarks.front.idle import Idle
from scripts.benchmarks.front.processes import cpu_s, resident_bytes
from scripts.benchmarks.front.ways import Arrivals, _read


def burst(first_s: float, tokens_per_s: float) -> Burst:
    return Burst(first_s, first_s, tokens_per_s, 1, 1, 1, 1)


PAIRS = [(burst(0.1, 100), burst(0.102, 99)), (burst(0.3, 50), burst(0.304, 50)), (burst(0.1, 100), burst(0.5, 10))]


def measured(*, is_paced: bool) -> Measured:
    queue, front = zip(*PAIRS, strict=True)
    return Measured(Case("a", 0.0, is_paced, 10), queue, front)


def test_the_front_is_compared_with_the_burst_beside_it() -> None:
    assert measured(is_paced=True).later_s == pytest.approx(0.004)
    assert measured(is_paced=True).rate == pytest.approx(0.99)


def test_the_paced_engine_and_idle_streams_have_bars_and_the_real_model_has_none() -> None:
    verdicts = _verdicts([measured(is_paced=True), measured(is_paced=False)], Idle(1000, 100_001, 5))
    assert [(each.bar, each.holds) for each in verdicts] == [("≤ 5", True), ("≥ 0.97", True), ("≤ 100", False)]


def test_the_client_notes_pieces_of_text_and_the_usage() -> None:
    chunks = [{"choices": [{"delta": delta}]} for delta in ({"role": "assistant"}, {"content": "a"}, {"content": "b"})]
    last = {"choices": [], "usage": {"completion_tokens": 2}}
    arrivals = Arrivals()
    for event in (*chunks, last):
        _read(f"id: 1\ndata: {json.dumps(event)}\n\n".encode(), arrivals)
    _read(b"data: [DONE]\n\n", arrivals)
    assert (len(arrivals.pieces), arrivals.tokens) == (2, 2)


def test_an_error_in_a_stream_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError):
        _read(b'data: {"error":{"message":"no"}}\n\n', Arrivals())


def test_the_cost_of_a_process_is_read() -> None:
    assert cpu_s(os.getpid()) > 0
    assert resident_bytes(os.getpid()) > 1_000_000
