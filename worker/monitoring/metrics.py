"""A worker's Prometheus metrics, served by `worker.monitoring.probes`.

Names and meanings are vLLM's if it has the metric; ours begin with `sluice:`. Imported only if a port is set.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from sluice.contract.events import ErrorType
from sluice.contract.keys import LANES, Lane
from sluice.tracing import Tracing
from worker.host.courtesy import Signals, Throttle
from worker.monitoring.sink import JOB_S, TOKEN_S, CallFault, Durations, MetricsSink
from worker.outcomes import MAX_DRAFT, DraftUse, StepReport

_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)

_TOKENS = tuple(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5))
_ROWS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
_CLAIM_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
_RATIO = (0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5, 2, 4)

_ENDINGS = ("stop", "length", "tool_calls", "abort", "error")  # the last two are vLLM's for cancelled and failed
_NOT_ADMITTED: tuple[ErrorType, ...] = ("too_large", "overloaded")

_BY_MODEL = ("model_name",)
_BY_LANE = ("model_name", "lane")


class Metrics(MetricsSink):
    """Metrics of one worker, and the collector of those that `MetricsSink` counts. Seconds are never negative."""

    def __init__(self, model_name: str, tracing: Tracing | None = None) -> None:
        self.registry = CollectorRegistry()
        super().__init__(tracing)
        self._model = model_name
        self.registry.register(self)
        make = _Families(self.registry, model_name)
        self._add_job_metrics(make)
        self._add_engine_metrics(make)
        self._add_fleet_metrics(make)
        self._add_host_metrics(make)

    def _add_job_metrics(self, make: "_Families") -> None:
        self._running = make.by_lane(Gauge, "vllm:num_requests_running", "Jobs that this worker runs.")
        self._waiting = make.by_lane(
            Gauge,
            "vllm:num_requests_waiting",
            "Jobs in the queue that no worker runs. All workers report the same number: use max, not sum.",
        )
        self._queue_s = make.seconds("vllm:request_queue_time_seconds", "Seconds from submission to claim.")
        self._prefill_s = make.seconds(
            "vllm:request_prefill_time_seconds", "Seconds from claim to the end of the prompt."
        )
        self._decode_s = make.seconds("vllm:request_decode_time_seconds", "Seconds from the first token to the last.")
        self._e2e_s = make.seconds(
            "vllm:e2e_request_latency_seconds", "Seconds from submission to the end, of finished jobs."
        )
        self._prompt_tokens = make.by_lane(Counter, "vllm:prompt_tokens", "Prompt tokens processed.")
        self._prompts = make.by_lane(
            Histogram, "vllm:request_prompt_tokens", "Prompt tokens of a finished job.", buckets=_TOKENS
        )
        self._answers = make.by_lane(
            Histogram, "vllm:request_generation_tokens", "Answer tokens of a finished job.", buckets=_TOKENS
        )
        self._ended = make.by_lane_and(
            "finished_reason",
            _ENDINGS,
            "vllm:request_success",
            "Ended jobs, by finished_reason: stop, length, tool_calls, abort (cancelled) or error (failed).",
        )
        self._failed = make.by_lane_and(
            "error_type", get_args(ErrorType), "sluice:request_failures", "Failed jobs, by error_type as in the event."
        )
        self._rejected = make.by_lane_and(
            "reason",
            _NOT_ADMITTED,
            "vllm:admission_rejections",
            "Failed jobs that do not fit into memory or context, by reason: too_large or overloaded.",
        )
        self._faulty_calls = make.by_lane_and(
            "fault",
            get_args(CallFault),
            "sluice:faulty_tool_calls",
            "Wrong calls of finished jobs, by fault: unknown_function, no_json_object or "
            "missing_argument. They are delivered, and named in the answer's warnings.",
        )
        self._taken_over = make.by_lane(Counter, "sluice:takeovers", "Jobs taken over from a worker that died.")

    def _add_engine_metrics(self, make: "_Families") -> None:
        self._evicted = make.by_model(
            Counter, "sluice:prefix_cache_evictions", "Segments, snapshots and images evicted from the prefix cache."
        )
        self._drafts = make.by_model(Counter, "vllm:spec_decode_num_drafts", "Verified drafts, each of one row.")
        self._drafted = make.by_model(Counter, "vllm:spec_decode_num_draft_tokens", "Verified draft tokens.")
        self._accepted = make.by_model(Counter, "vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._accepted_at = make.by_model_and(
            "position",
            tuple(map(str, range(MAX_DRAFT))),
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their position in the draft, from 0.",
        )
        self._prefixes = make.by_model(Gauge, "sluice:prefix_cache_bytes", "Size of the prefix cache.")
        self._step_s = make.by_model(Histogram, "sluice:step_seconds", "Seconds of an engine step.", buckets=TOKEN_S)
        self._step_rows = make.by_model(Histogram, "sluice:step_rows", "Rows that decode in a step.", buckets=_ROWS)
        self._awaiting_memory = make.by_model(
            Gauge, "sluice:rows_awaiting_memory", "Claimed jobs that wait for memory."
        )
        self._rows_preempted = make.by_model(
            Gauge, "sluice:rows_preempted", "Offline rows preempted now for interactive ones."
        )
        self._preempted = make.by_model(Counter, "vllm:num_preemptions", "Preemptions of rows.")
        self._out_of_memory = make.by_model(
            Counter,
            "sluice:rows_out_of_memory",
            "Rows that lost their caches because the device had no memory. They are computed again, fewer at once.",
        )
        self._reserved = make.by_model(Gauge, "vllm:kv_cache_usage_perc", "Share of the rows' memory that is reserved.")
        self._predicted = make.by_model(
            Gauge, "sluice:memory_predicted_bytes", "Predicted peak memory of the rows, without the model."
        )
        self._measured = make.by_model(Gauge, "sluice:memory_measured_bytes", "Measured peak memory of the same rows.")
        self._ratio = make.by_model(
            Histogram,
            "sluice:memory_prediction_ratio",
            "Measured divided by predicted peak memory; above 1, the prediction was too low.",
            buckets=_RATIO,
        )

    def _add_fleet_metrics(self, make: "_Families") -> None:
        self._claims_left = make.by_model_and(
            "why",
            ("cache", "load"),
            "sluice:claims_left",
            "Jobs left to another worker, by why: cache or load.",
        )
        self._claims_overruled = make.by_model(
            Counter, "sluice:claims_overruled", "Jobs taken although another worker was better."
        )
        self._left_s = make.by_model(
            Histogram, "sluice:left_seconds", "Seconds from when a job was left until its claim.", buckets=JOB_S
        )
        self._claim_scanned = make.by_model(
            Histogram, "sluice:claim_scanned_jobs", "Waiting jobs that a claim compares.", buckets=_ROWS
        )
        self._claim_s = make.by_model(Histogram, "sluice:claim_seconds", "Seconds of a claim.", buckets=_CLAIM_S)
        self._hint_tokens = make.by_model(
            Counter,
            "sluice:prefix_hint_tokens",
            "Prompt tokens that claims expected in the prefix cache.",
        )
        self._marks = make.by_model(Gauge, "sluice:prefix_marks", "Known beginnings of prompts in the cache.")
        self._ready_ms = make.by_model(Gauge, "sluice:ready_ms", "Milliseconds until all prompts are computed.")

    def _add_host_metrics(self, make: "_Families") -> None:
        self._pressure = make.by_model(
            Gauge,
            "sluice:memory_pressure",
            "How short of memory the machine is: 0 (normal), 1 (warning) or 2 (critical).",
        )
        self._reclaim = make.by_model(
            Gauge,
            "sluice:memory_reclaim",
            "Memory given back to the machine: 0 (none), half of the prefix cache (1), all of it (2), offline rows too "
            "(3), and new jobs wait (4).",
        )
        self._shares = {
            "interactive": make.by_model(Gauge, "sluice:step_share", "Share of the time that steps may take."),
            "batch": make.by_model(
                Gauge, "sluice:offline_step_share", "Share of the time that steps may take while only offline jobs run."
            ),
        }
        self._states = {
            "in_use": make.by_model(Gauge, "sluice:machine_in_use", "1 if a person uses the machine."),
            "hot": make.by_model(Gauge, "sluice:machine_hot", "1 if the machine is hot."),
            "on_battery": make.by_model(Gauge, "sluice:machine_on_battery", "1 if the machine is on battery."),
        }
        self._is_awake = make.by_model(Gauge, "sluice:sleep_held_off", "1 if the worker holds the machine's sleep off.")
        self.set_host(Signals(), Throttle(), is_awake=False)

    # A job's life

    def claimed(self, lane: Lane, *, queue_s: float, lease_expirations: int) -> None:
        self._running[lane].inc()
        self._queue_s[lane].observe(queue_s)
        if lease_expirations:
            self._taken_over[lane].inc()

    def first_token(self, lane: Lane, *, ttft_s: float, prefill_s: float, prompt_tokens: int) -> None:
        super().first_token(lane, ttft_s=ttft_s, prefill_s=prefill_s, prompt_tokens=prompt_tokens)
        self._prefill_s[lane].observe(prefill_s)
        self._prompt_tokens[lane].inc(prompt_tokens)

    def finished(
        self, lane: Lane, reason: str, *, e2e_s: float, decode_s: float, prompt_tokens: int, completion_tokens: int
    ) -> None:
        self._ended[lane, reason].inc()
        self._e2e_s[lane].observe(e2e_s)
        self._decode_s[lane].observe(decode_s)
        self._prompts[lane].observe(prompt_tokens)
        self._answers[lane].observe(completion_tokens)

    def faulty_calls(self, lane: Lane, faults: Sequence[CallFault]) -> None:
        for fault in faults:
            self._faulty_calls[lane, fault].inc()

    def failed(self, lane: Lane, error: ErrorType) -> None:
        self._ended[lane, "error"].inc()
        self._failed[lane, error].inc()
        if error in _NOT_ADMITTED:
            self._rejected[lane, error].inc()

    def cancelled(self, lane: Lane) -> None:
        self._ended[lane, "abort"].inc()

    def released(self, lane: Lane) -> None:
        self._running[lane].dec()

    def looked(
        self, cache: int, load: int, overruled: int, left_s: Sequence[float], scanned: int, seconds: float
    ) -> None:
        super().looked(cache, load, overruled, left_s, scanned, seconds)
        self._claims_left["cache"].inc(cache)
        self._claims_left["load"].inc(load)
        self._claims_overruled.inc(overruled)
        for each in left_s:
            self._left_s.observe(max(0.0, each))
        if scanned:  # idle workers claim twice a second
            self._claim_scanned.observe(scanned)
        self._claim_s.observe(seconds)

    def hinted(self, tokens: int, found: int) -> None:
        super().hinted(tokens, found)
        self._hint_tokens.inc(tokens)

    def set_ready(self, ms: int, marks: int) -> None:
        self._ready_ms.set(ms)
        self._marks.set(marks)

    # Current state

    def set_waiting(self, lane: Lane, jobs: int) -> None:
        self._waiting[lane].set(jobs)

    def set_host(self, signals: Signals, throttle: Throttle, *, is_awake: bool) -> None:
        super().set_host(signals, throttle, is_awake=is_awake)
        self._pressure.set(signals.pressure)
        self._reclaim.set(throttle.reclaim)
        self._shares["interactive"].set(throttle.share)
        self._shares["batch"].set(throttle.offline_share)
        for name, state in self._states.items():
            state.set(name in signals.reasons)
        self._is_awake.set(is_awake)

    def record_step(self, step: StepReport) -> None:
        super().record_step(step)
        self._step_rows.observe(step.rows)
        self._step_s.observe(step.seconds)
        self._awaiting_memory.set(step.num_waiting)
        self._rows_preempted.set(step.num_preempted)
        self._preempted.inc(step.num_preemptions)
        self._out_of_memory.inc(step.num_out_of_memory)
        if step.reserved:
            used, there = step.reserved
            self._reserved.set(used / there)
        self._evicted.inc(step.prefix.evicted)
        self._prefixes.set(step.prefix.nbytes)
        if step.drafts.drafts:
            self._record_drafts(step.drafts)
        if step.memory:
            self._record_memory(*step.memory)

    def _record_drafts(self, use: DraftUse) -> None:
        self._drafts.inc(use.drafts)
        self._drafted.inc(use.proposed)
        self._accepted.inc(use.accepted)
        for position, accepted in enumerate(use.accepted_at):
            self._accepted_at[str(position)].inc(accepted)

    def _record_memory(self, predicted: int, measured: int) -> None:
        self._predicted.set(predicted)
        self._measured.set(measured)
        self._ratio.observe(measured / predicted)

    # What `MetricsSink` counts

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Called on the server's threads while the loop counts, so numbers may differ by a token."""
        queried = CounterMetricFamily(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", labels=_BY_MODEL
        )
        hits = CounterMetricFamily(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", labels=_BY_MODEL
        )
        queried.add_metric((self._model,), self._queried)
        hits.add_metric((self._model,), self._hit)
        tokens = CounterMetricFamily("vllm:generation_tokens", "Answer tokens.", labels=_BY_LANE)
        for lane in LANES:
            tokens.add_metric((self._model, lane), self._tokens[lane])
        yield from (queried, hits, tokens)
        yield self._histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from submission to the first token. A job's own ttft_s counts from the claim.",
            self._ttft_s,
        )
        yield self._histogram(
            "vllm:inter_token_latency_seconds", "Seconds between two tokens of an answer.", self._gaps
        )

    def _histogram(self, name: str, help: str, by_lane: dict[Lane, Durations]) -> Metric:
        family = HistogramMetricFamily(name, help, labels=_BY_LANE)
        for lane, counted in by_lane.items():
            names = [*(str(float(bound)) for bound in counted.bounds), "+Inf"]
            upto = accumulate(counted.buckets.copy())
            family.add_metric((self._model, lane), list(zip(names, upto, strict=True)), counted.total_s)
        return family


class _Families:
    """Makes metrics with their labels, and all series at zero from the start: Prometheus computes no increase for a
    series that begins with its first event."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry, self._model = registry, model_name

    def by_model(self, kind: type[_Kind], name: str, help: str, **more: Any) -> _Kind:
        return kind(name, help, _BY_MODEL, registry=self._registry, **more).labels(self._model)

    def by_model_and(self, label: str, values: tuple[str, ...], name: str, help: str) -> dict[str, Counter]:
        family = Counter(name, help, (*_BY_MODEL, label), registry=self._registry)
        return {value: family.labels(self._model, value) for value in values}

    def by_lane(self, kind: type[_Kind], name: str, help: str, **more: Any) -> dict[Lane, _Kind]:
        family = kind(name, help, _BY_LANE, registry=self._registry, **more)
        return {lane: family.labels(self._model, lane) for lane in LANES}

    def seconds(self, name: str, help: str) -> dict[Lane, Histogram]:
        return self.by_lane(Histogram, name, help, buckets=JOB_S)

    def by_lane_and(self, label: str, values: tuple[str, ...], name: str, help: str) -> dict[tuple[Lane, str], Counter]:
        family = Counter(name, help, (*_BY_LANE, label), registry=self._registry)
        return {(lane, value): family.labels(self._model, lane, value) for lane in LANES for value in values}
