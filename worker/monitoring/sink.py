"""The receiver of a worker's measurements."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from sluice.contract.events import ErrorType
from sluice.contract.keys import LANES, Lane
from sluice.tracing import Tracing
from worker.host.courtesy import Signals, Throttle
from worker.outcomes import StepReport

# What can be wrong with a call that a model writes. It is delivered all the same.
CallFault = Literal["unknown_function", "no_json_object", "missing_argument"]


# A token takes 5 ms (a small model on a Mac) to 100 ms, the default target of a step; more shows a problem.
TOKEN_S = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
# From a job that is claimed at once, over the minutes of a long prompt, to an offline job that is queued for a day.
JOB_S = (
    0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 600, 1800,
    3600, 14_400, 86_400,
)  # fmt: skip


class Durations:
    """A histogram of seconds, counted by hand: prometheus-client's takes 1.7 µs for each, of the ten that publishing a
    token may take; this takes a third of that."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: the largest seconds of each bucket but the last."""
        self.bounds, self.total_s = bounds, 0.0
        self.buckets = [0] * (len(bounds) + 1)

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds

    def quantiles_ms(self, before: Sequence[int], *shares: float) -> list[float | None]:
        """Return these quantiles of what was added since the buckets were `before`, each interpolated in its bucket as
        Prometheus does; None if nothing was."""
        upto = [0, *accumulate(now - then for now, then in zip(self.buckets, before, strict=True))]
        edges = [0.0, *self.bounds, self.bounds[-1]]
        found = list[float | None]()
        for rank in (share * upto[-1] for share in shares):
            i = bisect_left(upto, rank, lo=1) if rank else 0
            within = (rank - upto[i - 1]) / (upto[i] - upto[i - 1]) if i else 0.0
            found.append(round(1000 * (edges[i - 1] + within * (edges[i] - edges[i - 1])), 1) if i else None)
        return found


class _Totals(NamedTuple):
    """Counts since the start."""

    at: float  # monotonic
    tokens: int
    ttft: tuple[int, ...]
    gaps: tuple[int, ...]
    queried: int
    hit: int
    stepped_s: float
    left: int
    overruled: int
    hinted: int
    hints_found: int


class MetricsSink:
    """Receives the measurements of one worker, and keeps what its presence publishes: a worker without a metrics port
    needs no Prometheus. `Metrics` counts all of them."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """`tracing`: makes spans of the jobs; None: they are not wanted."""
        self.tracing = tracing
        self._tokens = dict.fromkeys(LANES, 0)
        self._gaps = {lane: Durations(TOKEN_S) for lane in LANES}
        self._ttft_s = {lane: Durations(JOB_S) for lane in LANES}
        # Prompt tokens looked up in the prefix cache, and found.
        self._queried, self._hit = 0, 0
        self._stepped_s = 0.0
        # Jobs left to other workers, those taken although another was better; tokens that claims expected, and found.
        self._left, self._overruled = 0, 0
        self._hinted, self._hints_found = 0, 0
        self._cache_bytes, self._memory = 0, (0, 0)
        self._past = deque[_Totals]()  # of the last minute
        self._host = _host_fields(Signals(), Throttle(), is_awake=False)

    def measured(self) -> dict[str, float | str]:
        """Return what presence publishes, each field empty if nothing happened: quantiles of interactive jobs and the
        share of prompt tokens found in the cache, over the last minute; tokens a second, and the share of the time in
        steps, over ten seconds."""
        ttft_s, gaps = self._ttft_s["interactive"], self._gaps["interactive"]
        past = self._past
        now = _Totals(
            time.monotonic(), sum(self._tokens.values()), tuple(ttft_s.buckets), tuple(gaps.buckets), self._queried,
            self._hit, self._stepped_s, self._left, self._overruled, self._hinted, self._hints_found,
        )  # fmt: skip
        past.append(now)
        while len(past) > 2 and now.at - past[1].at >= 60.0:  # seconds
            past.popleft()
        minute = past[0]
        recent = next((each for each in reversed(past) if now.at - each.at >= 10.0), minute)
        hinted = now.hinted - minute.hinted
        queried, took_s = now.queried - minute.queried, max(now.at - recent.at, 0.1)
        ttft_p50, ttft_p95 = ttft_s.quantiles_ms(minute.ttft, 0.5, 0.95)
        gap_p50, gap_p95 = gaps.quantiles_ms(minute.gaps, 0.5, 0.95)
        measured: dict[str, float | None] = {
            "tokens_per_s": round((now.tokens - recent.tokens) / took_s, 1),
            "load": round(min(1.0, (now.stepped_s - recent.stepped_s) / took_s), 3),
            "ttft_p50_ms": ttft_p50,
            "ttft_p95_ms": ttft_p95,
            "gap_p50_ms": gap_p50,
            "gap_p95_ms": gap_p95,
            "prefix_hit_rate": round((now.hit - minute.hit) / queried, 3) if queried else None,
            "claims_left": now.left - minute.left,
            "claims_overruled": now.overruled - minute.overruled,
            "prefix_hint_rate": round((now.hints_found - minute.hints_found) / hinted, 3) if hinted else None,
            "prefix_cache_bytes": self._cache_bytes,
            "memory_bytes": self._memory[0],
            "memory_limit_bytes": self._memory[1] or None,
        }
        return {name: "" if value is None else value for name, value in measured.items()} | self._host

    # A job's life

    def claimed(self, lane: Lane, *, queue_s: float, lease_expirations: int) -> None:
        """Count a claim. `queue_s`: seconds in the queue. `lease_expirations`: times that the job's lease expired."""

    def first_token(self, lane: Lane, *, ttft_s: float, prefill_s: float, prompt_tokens: int) -> None:
        """Count an attempt's first token, once per attempt, even if it ends the answer."""
        self._ttft_s[lane].add(ttft_s)

    def token(self, lane: Lane, gap_s: float | None) -> None:
        """Count a token of a row, on the event loop. `gap_s`: seconds since the one before; None for the first."""
        self._tokens[lane] += 1
        if gap_s is not None:
            self._gaps[lane].add(gap_s)

    def finished(
        self, lane: Lane, reason: str, *, e2e_s: float, decode_s: float, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Count a finished job. `reason`: its finish reason. `e2e_s`: seconds since submission."""

    def faulty_calls(self, lane: Lane, faults: Sequence[CallFault]) -> None:
        """Count the calls of a finished job in which something is wrong, by the first such thing in each."""

    def failed(self, lane: Lane, error: ErrorType) -> None:
        """Count a failed job."""

    def cancelled(self, lane: Lane) -> None:
        """Count a cancelled job."""

    def released(self, lane: Lane) -> None:
        """Count that a claimed job has left this worker: once per claim, if requeued or lost too."""

    # What claims leave to other workers, and which prefixes they expect

    def looked(
        self, cache: int, load: int, overruled: int, left_s: Sequence[float], scanned: int, seconds: float
    ) -> None:
        """Count a claim: see `FleetRecord.counted`."""
        self._left += cache + load
        self._overruled += overruled

    def hinted(self, tokens: int, found: int) -> None:
        """Count a computed prompt: tokens that its claim expected in the prefix cache, and those found there."""
        self._hinted += tokens
        self._hints_found += found

    def set_ready(self, ms: int, marks: int) -> None:
        """Set the milliseconds until this worker will be done with its prompts, and the marks whose prefixes it has."""

    # Current state

    def set_waiting(self, lane: Lane, jobs: int) -> None:
        """Set the number of jobs that wait in the lane's queue."""

    def set_host(self, signals: Signals, throttle: Throttle, *, is_awake: bool) -> None:
        """Set the state of the machine, what is left to others on it, and if its sleep is held off."""
        self._host = _host_fields(signals, throttle, is_awake=is_awake)

    def record_step(self, step: StepReport) -> None:
        """Record a step of the engine."""
        self._queried += step.prefix.queried
        self._hit += step.prefix.hit
        self._stepped_s += step.seconds
        self._cache_bytes = step.prefix.nbytes
        self._memory = step.reserved or self._memory


def _host_fields(signals: Signals, throttle: Throttle, *, is_awake: bool) -> dict[str, float | str]:
    """Return what presence publishes of the machine."""
    return {
        "memory_pressure": signals.pressure.name.lower(),
        "memory_reclaim": throttle.reclaim.name.lower(),
        "machine": " ".join([*signals.reasons, *(["awake"] if is_awake else [])]),
        "step_share": throttle.share,
        "offline_step_share": throttle.offline_share,
    }
