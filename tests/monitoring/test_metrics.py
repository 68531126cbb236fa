"""Metrics are counted under their names, and can be scraped at any time."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from tests.scrape import Page, scrape
from tests.support.stack import free_port
from worker.monitoring.health import Health
from worker.monitoring.metrics import Metrics
from worker.monitoring.probes import answer_probes
from worker.outcomes import DraftUse, PrefixUse, StepReport

# As vLLM 0.32 documents them.
VLLM = {
    "num_requests_running", "num_requests_waiting", "num_preemptions", "kv_cache_usage_perc", "prompt_tokens",
    "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success", "admission_rejections",
    "request_prompt_tokens", "request_generation_tokens", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "e2e_request_latency_seconds", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
}  # fmt: skip

GAPS = "vllm:inter_token_latency_seconds"


def page(metrics: Metrics) -> Page:
    port = free_port()
    with answer_probes(port, metrics.registry, Health(60)):
        return scrape(port)


def finish(metrics: Metrics, reason: str = "stop") -> None:
    metrics.finished("interactive", reason, e2e_s=3.0, decode_s=2.0, prompt_tokens=40, completion_tokens=7)


def test_every_name_is_one_that_vllm_has_or_begins_with_ours() -> None:
    names = page(Metrics("m")).names
    assert {name.removeprefix("vllm:") for name in names if not name.startswith("sluice:")} == VLLM


def test_every_series_is_there_and_zero_before_the_first_event() -> None:
    fresh, used = Metrics("m"), Metrics("m")
    used.claimed("batch", queue_s=1, lease_expirations=1)
    used.first_token("batch", ttft_s=1, prefill_s=1, prompt_tokens=1)
    used.token("batch", 1)
    finish(used)
    used.failed("interactive", "too_large")
    used.cancelled("batch")
    used.record_step(StepReport((), rows=1, seconds=1))
    before, after = page(fresh), page(used)
    assert {(s.name, *s.labels.items()) for s in before.samples} == {(s.name, *s.labels.items()) for s in after.samples}
    assert {s.value for s in before.samples if not s.name.endswith("step_share")} == {0}


def test_the_model_is_a_label_of_every_series_and_the_lane_of_what_jobs_do() -> None:
    samples = page(Metrics("qwen")).samples
    assert {s.labels["model_name"] for s in samples} == {"qwen"}
    without_lane = {s.name for s in samples if "lane" not in s.labels}
    of_jobs = {name for name in without_lane if "request" in name or "token" in name}
    assert {
        name for name in of_jobs if "spec_decode" not in name and "hint" not in name
    } == set()  # both lanes share a forward


def test_a_job_runs_from_its_claim_until_it_has_left() -> None:
    metrics = Metrics("m")
    metrics.claimed("interactive", queue_s=0.1, lease_expirations=0)
    metrics.claimed("interactive", queue_s=0.1, lease_expirations=0)
    finish(metrics)
    metrics.released("interactive")
    read = page(metrics)
    assert read("vllm:num_requests_running", lane="interactive") == 1
    assert read("vllm:num_requests_running", lane="batch") == 0


def test_lanes_are_counted_apart() -> None:
    metrics = Metrics("m")
    metrics.claimed("batch", queue_s=7200, lease_expirations=0)
    metrics.claimed("interactive", queue_s=0.02, lease_expirations=0)
    read = page(metrics)
    assert read("vllm:request_queue_time_seconds_sum", lane="batch") == 7200
    assert read("vllm:request_queue_time_seconds_sum", lane="interactive") == 0.02


def test_a_claim_after_a_worker_died_is_a_takeover() -> None:
    metrics = Metrics("m")
    metrics.claimed("batch", queue_s=0, lease_expirations=0)
    metrics.claimed("batch", queue_s=0, lease_expirations=2)
    assert page(metrics)("sluice:takeovers_total") == 1


def test_a_finished_job_is_told_by_its_reason_and_measured() -> None:
    metrics = Metrics("m")
    for reason in ("stop", "length", "tool_calls", "stop"):
        finish(metrics, reason)
    read = page(metrics)
    told = [read("vllm:request_success_total", finished_reason=r) for r in ("stop", "length", "tool_calls")]
    assert told == [2, 1, 1]
    assert read("vllm:e2e_request_latency_seconds_sum") == 12
    assert read("vllm:request_decode_time_seconds_sum") == 8
    assert read("vllm:request_prompt_tokens_sum") == 160
    assert read("vllm:request_generation_tokens_sum") == 28


def test_faulty_calls_are_counted_by_their_fault() -> None:
    metrics = Metrics("m")
    metrics.faulty_calls("interactive", ["unknown_function", "missing_argument", "unknown_function"])
    read = page(metrics)
    faults = ("unknown_function", "no_json_object", "missing_argument")
    counted = [read("sluice:faulty_tool_calls_total", lane="interactive", fault=fault) for fault in faults]
    assert counted == [2, 0, 1]


def test_a_job_that_did_not_finish_is_counted_and_not_measured() -> None:
    metrics = Metrics("m")
    metrics.failed("interactive", "internal")
    metrics.cancelled("interactive")
    read = page(metrics)
    assert read("vllm:request_success_total", finished_reason="error") == 1
    assert read("vllm:request_success_total", finished_reason="abort") == 1
    assert read("sluice:request_failures_total", error_type="internal") == 1
    assert read("vllm:e2e_request_latency_seconds_count") == 0


def test_only_what_lacks_room_is_a_refused_admission() -> None:
    metrics = Metrics("m")
    for error in ("too_large", "overloaded", "invalid_request", "unsupported", "deadline", "internal"):
        metrics.failed("interactive", error)
    read = page(metrics)
    assert read("vllm:admission_rejections_total") == 2
    assert read("vllm:admission_rejections_total", reason="too_large") == 1
    assert read("sluice:request_failures_total") == 6


@given(st.lists(st.none() | st.floats(0, 100) | st.sampled_from([0.005, 0.1, 5.0])))
def test_tokens_are_counted_as_prometheus_client_would(gaps: list[float | None]) -> None:
    metrics, registry = Metrics("m"), CollectorRegistry()
    bounds = list(buckets(metrics.registry))
    theirs = Histogram(GAPS, "", ("model_name", "lane"), registry=registry, buckets=bounds).labels("m", "batch")
    for gap in gaps:
        metrics.token("batch", gap)
        if gap is not None:
            theirs.observe(gap)
    labels = {"model_name": "m", "lane": "batch"}
    assert buckets(metrics.registry) == buckets(registry)
    for name in (f"{GAPS}_sum", f"{GAPS}_count"):
        assert metrics.registry.get_sample_value(name, labels) == registry.get_sample_value(name, labels)
    assert metrics.registry.get_sample_value("vllm:generation_tokens_total", labels) == len(gaps)


def buckets(registry: CollectorRegistry) -> dict[str, float]:
    """Return the buckets of the time between tokens in the batch lane."""
    samples = (sample for family in registry.collect() for sample in family.samples)
    return {s.labels["le"]: s.value for s in samples if s.name == f"{GAPS}_bucket" and s.labels["lane"] == "batch"}


def test_an_engine_step_says_who_decodes_waits_and_is_parked() -> None:
    metrics = Metrics("m")
    metrics.record_step(StepReport((), rows=3, seconds=0.05, num_waiting=2, num_preempted=2, num_preemptions=2))
    metrics.record_step(StepReport((), rows=4, seconds=0.15, num_preempted=1))
    read = page(metrics)
    assert (read("sluice:step_rows_sum"), read("sluice:step_rows_count")) == (7, 2)
    assert read("sluice:step_seconds_sum") == pytest.approx(0.2)
    assert (read("sluice:rows_awaiting_memory"), read("sluice:rows_preempted")) == (0, 1)
    assert read("vllm:num_preemptions_total") == 2


def test_the_error_of_the_memory_prediction_is_a_ratio() -> None:
    metrics = Metrics("m")
    metrics.record_step(StepReport((), rows=1, memory=(1_000, 1_400)))
    metrics.record_step(StepReport((), rows=1, memory=(1_000, 900)))
    read = page(metrics)
    assert (read("sluice:memory_predicted_bytes"), read("sluice:memory_measured_bytes")) == (1_000, 900)
    assert read("sluice:memory_prediction_ratio_bucket", le="1.0") == 1
    assert read("sluice:memory_prediction_ratio_sum") == pytest.approx(2.3)


def test_what_stands_now_is_what_was_last_said() -> None:
    metrics = Metrics("m")
    metrics.set_waiting("batch", 12)
    metrics.set_waiting("batch", 5)
    used = PrefixUse(queried=50, hit=30, evicted=2, nbytes=700)
    metrics.record_step(StepReport((), rows=1, reserved=(3_000, 4_000), prefix=used))
    metrics.record_step(StepReport((), rows=1, prefix=used))
    read = page(metrics)
    assert read("vllm:num_requests_waiting", lane="batch") == 5
    assert read("vllm:kv_cache_usage_perc") == 0.75
    assert (read("vllm:prefix_cache_queries_total"), read("vllm:prefix_cache_hits_total")) == (100, 60)
    assert (read("sluice:prefix_cache_evictions_total"), read("sluice:prefix_cache_bytes")) == (4, 700)


def test_drafts_are_counted_by_their_tokens_and_positions() -> None:
    metrics = Metrics("tiny")
    metrics.record_step(StepReport((), rows=2))
    metrics.record_step(StepReport((), rows=2, drafts=DraftUse(2, 10, (2, 2, 1))))
    metrics.record_step(StepReport((), rows=2, drafts=DraftUse(1, 3, (1,))))
    read = page(metrics)
    assert read("vllm:spec_decode_num_drafts_total") == 3
    assert read("vllm:spec_decode_num_draft_tokens_total") == 13
    assert read("vllm:spec_decode_num_accepted_tokens_total") == 6
    by_position = [read("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(at)) for at in range(7)]
    assert by_position == [3, 2, 1, 0, 0, 0, 0]


def test_two_workers_in_one_process_count_for_themselves() -> None:
    one, other = Metrics("m"), Metrics("m")
    one.cancelled("batch")
    assert page(one)("vllm:request_success_total") == 1
    assert page(other)("vllm:request_success_total") == 0


def test_a_scrape_while_tokens_are_counted_is_in_order() -> None:
    metrics, port, enough = Metrics("m"), free_port(), threading.Event()

    def count() -> None:
        while not enough.is_set():
            for k in range(100):
                metrics.token("interactive", k / 50)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        with answer_probes(port, metrics.registry, Health(60)):
            for _ in range(5):
                read = scrape(port)
                heights = [s.value for s in read.samples if s.name == f"{GAPS}_bucket" and s.labels["lane"] != "batch"]
                assert heights == sorted(heights)
                assert heights[-1] == read(f"{GAPS}_count", lane="interactive") > 0
    finally:
        enough.set()
        counter.join()
