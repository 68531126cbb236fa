"""What a worker's presence publishes is counted without a metrics port too."""

import pytest

from tests.fakes import Clock
from worker.host.courtesy import Pressure, Reclaim, Signals, Throttle
from worker.monitoring import sink
from worker.monitoring.metrics import Metrics
from worker.monitoring.sink import Durations, MetricsSink
from worker.outcomes import PrefixUse, StepReport

NOTHING = {
    "tokens_per_s": 0.0, "load": 0.0, "ttft_p50_ms": "", "ttft_p95_ms": "", "gap_p50_ms": "", "gap_p95_ms": "",
    "prefix_hit_rate": "", "claims_left": 0, "claims_overruled": 0, "prefix_hint_rate": "", "prefix_cache_bytes": 0,
    "memory_bytes": 0, "memory_limit_bytes": "",
    "memory_pressure": "normal", "memory_reclaim": "nothing", "machine": "",
    "step_share": 1.0, "offline_step_share": 1.0,
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(sink, "time", made)
    return made


def answer(metrics: MetricsSink, tokens: int, gap_s: float) -> None:
    metrics.first_token("interactive", ttft_s=0.4, prefill_s=0.3, prompt_tokens=10)
    metrics.token("interactive", None)
    for _ in range(tokens - 1):
        metrics.token("interactive", gap_s)


@pytest.mark.parametrize("metrics", [MetricsSink(), Metrics("m")], ids=["sink", "metrics"])
def test_the_load_is_counted_with_and_without_prometheus(clock: Clock, metrics: MetricsSink) -> None:
    assert metrics.measured() == NOTHING
    answer(metrics, 101, 0.03)
    metrics.looked(1, 2, 1, [0.5], 16, 0.001)
    metrics.hinted(800, 600)
    prefix = PrefixUse(queried=40, hit=10, nbytes=9)
    metrics.record_step(StepReport((), rows=1, seconds=2.0, reserved=(70, 100), prefix=prefix))
    throttle = Throttle(1.0, 0.25, Reclaim.NEW_JOBS)
    metrics.set_host(Signals(Pressure.CRITICAL, idle_s=1.0, hot=True), throttle, is_awake=True)
    clock.now += 10
    assert metrics.measured() == {
        "tokens_per_s": 10.1, "load": 0.2, "ttft_p50_ms": 400.0, "ttft_p95_ms": 490.0, "gap_p50_ms": 27.5,
        "gap_p95_ms": 29.8,
        "prefix_hit_rate": 0.25, "claims_left": 3, "claims_overruled": 1, "prefix_hint_rate": 0.75,
        "prefix_cache_bytes": 9, "memory_bytes": 70, "memory_limit_bytes": 100,
        "memory_pressure": "critical", "memory_reclaim": "new_jobs", "machine": "in_use hot awake", "step_share": 1.0,
        "offline_step_share": 0.25,
    }  # fmt: skip


def test_a_minute_later_only_sizes_are_left(clock: Clock) -> None:
    metrics = MetricsSink()
    answer(metrics, 5, 0.03)
    metrics.record_step(StepReport((), rows=1, reserved=(70, 100), prefix=PrefixUse(queried=40, hit=10, nbytes=9)))
    metrics.measured()
    for _ in range(25):
        clock.now += 3
        load = metrics.measured()
    assert load == {**NOTHING, "prefix_cache_bytes": 9, "memory_bytes": 70, "memory_limit_bytes": 100}


def test_the_past_holds_a_minute_and_no_more(clock: Clock) -> None:
    metrics = MetricsSink()
    for _ in range(100):
        clock.now += 1
        metrics.measured()
    answer(metrics, 2, 0.03)
    clock.now += 59
    assert metrics.measured()["ttft_p50_ms"] == 400.0
    assert len(metrics._past) <= 62


def test_offline_jobs_count_as_tokens_and_in_no_quantile(clock: Clock) -> None:
    metrics = MetricsSink()
    metrics.measured()
    metrics.first_token("batch", ttft_s=4000, prefill_s=1, prompt_tokens=1)
    for _ in range(20):
        metrics.token("batch", 0.2)
    clock.now += 5
    assert metrics.measured() == {**NOTHING, "tokens_per_s": 4.0}


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    durations = Durations((1, 2))
    durations.add(1000)
    assert durations.quantiles_ms([0, 0, 0], 0.5, 1.0) == [2000.0, 2000.0]
