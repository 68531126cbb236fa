"""The engine's steps on a virtual clock: which rows decode, which forwards run, and when tokens reach the client."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from scripts.simulation.arrivals import Arrival, Request
from scripts.simulation.costs import Costs
from scripts.simulation.policies import Planner
from worker.engine.step.cost import Forward, PromptChunk

MAX_ROWS = 32
NOISE = 0.04  # standard deviation of the logarithm of a forward's seconds


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What lengthens steps, and no plan can expect."""

    stalls_per_s: float = 0.0  # another process has the processor for a while
    stall_s: float = 0.4  # on average
    hidden: float = 0.0  # part of each step that no measured cost contains: all plans are too short by it


NONE = Disturbance()


class Machine:
    """Runs requests to their end. As in the engine, a decode step runs while the host handles the tokens of the one
    before, and is waited for if prompts are computed after it."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        planner: Planner,
        costs: Costs,
        seed: int = 0,
        disturbance: Disturbance = NONE,
    ) -> None:
        """`seed`: of the noise in measured times, and of stalls."""
        self.requests = [Request(str(number), arrival) for number, arrival in enumerate(arrivals)]
        self.now_s = 0.0
        self.prompt_tokens = self.forwards = 0  # of prefill
        self._planner, self._costs = planner, costs
        self._dice, self._stall_dice = Random(seed), Random(seed)
        self._disturbance = disturbance
        self._queue = deque(self.requests)
        self._waiting: dict[str, Request] = {}
        self._running: list[Request] = []
        self._fed: list[Request] = []  # rows of the decode step that was launched last
        self._decode_s: float | None = None  # seconds of that step; None once it has ended
        self._reported_s = 0.0
        self._admits_until_s = 0.0  # the host runs ahead of the device, so it knows of earlier arrivals only

    def run(self) -> None:
        """Run until every request has ended."""
        while self._queue or self._waiting or self._running:
            if not (self._waiting or self._running):
                self.now_s = self._admits_until_s = max(self.now_s, self._queue[0].arrival.at_s)
            self._admit()
            self.now_s += self._costs.overheads.step_s
            if self._planner.policy.prefill_first:
                self._prefill_and_decode()
            else:
                self._decode_and_prefill()

    def _admit(self) -> None:
        while self._queue and self._queue[0].arrival.at_s <= self._admits_until_s and self._active < MAX_ROWS:
            request = self._queue.popleft()
            request.admitted_s = self.now_s
            self._waiting[request.id] = request

    @property
    def _active(self) -> int:
        return len(self._waiting) + len(self._running)

    def _prefill_and_decode(self) -> None:
        self._prefill()
        computed = self._launch()
        self._post(self._collect(computed))

    def _decode_and_prefill(self) -> None:
        collected = self._collect(self._launch())
        self._prefill()
        self._post(collected)

    def _launch(self) -> list[Request]:
        """Launch a decode step when the one before has ended. Returns the rows of that one."""
        self._wait()
        computed = self._fed
        self._fed = [] if self._delays_first_step() else [*self._running]
        for request in self._fed:
            request.started = True
        if self._fed:
            self._decode_s = self._noisy(self._costs.forward_s(len(self._fed), 1))
        return computed

    @property
    def _started(self) -> bool:
        """True if a running request decodes, or has decoded."""
        return any(request.started for request in self._running)

    def _delays_first_step(self) -> bool:
        if not self._running or self._started:
            return False
        delayed_s = self.now_s - min(request.joined_s for request in self._running)
        return self._planner.delays_first_step(self._waiting.values(), self._running, delayed_s)

    def _wait(self) -> None:
        """Let the running decode step end."""
        self.now_s += self._decode_s or 0.0
        self._decode_s = None

    def _collect(self, computed: Sequence[Request]) -> list[Request]:
        """Return the rows that have a new token. Rows that have all their tokens leave."""
        collected = [request for request in computed if request in self._running]
        for request in collected:
            if len(request.token_times_s) + 1 == request.arrival.answer:
                self._running.remove(request)
        return collected

    def _post(self, collected: Sequence[Request]) -> None:
        if collected:
            self.now_s += self._disturbance.hidden * (self.now_s - self._reported_s)
        for request in collected:
            request.token_times_s.append(self.now_s)
        self._planner.observe_gap(self.now_s - self._reported_s)
        self._reported_s = self._admits_until_s = self.now_s
        if not self._running:
            self._wait()  # a step of rows that have all ended

    def _prefill(self) -> None:
        if not self._waiting:
            return
        self._wait()
        waiting = [*self._waiting.values()]
        for forward in self._planner.plan(waiting, self._running, self.now_s, started=self._started):
            self._compute(forward)

    def _compute(self, forward: Forward) -> None:
        rows = [self._waiting[chunk.id] for chunk in forward.chunks]
        if tokens := max(chunk.tokens for chunk in forward.chunks):  # shorter chunks are padded
            seconds = self._noisy(self._costs.forward_s(len(rows), tokens)) + len(rows) * self._costs.overheads.chunk_s
            self.now_s += seconds
            self._planner.observe_forward([row.done for row in rows], tokens, seconds)
            self.prompt_tokens += sum(chunk.tokens for chunk in forward.chunks)
            self.forwards += 1
        for row, chunk in zip(rows, forward.chunks, strict=True):
            self._advance(row, chunk)

    def _advance(self, row: Request, chunk: PromptChunk) -> None:
        row.done += chunk.tokens
        if chunk.joins:
            seconds = self._noisy(self._costs.overheads.join_s)
            self.now_s += seconds
            self._planner.observe_join(row.total, seconds)
            row.joined_s = self.now_s
            self._running.append(self._waiting.pop(row.id))

    def _noisy(self, seconds: float) -> float:
        return seconds * self._dice.lognormvariate(0.0, NOISE) + self._stall_s(seconds)

    def _stall_s(self, seconds: float) -> float:
        """Return the seconds of a stall during work of `seconds`; mostly 0."""
        stalls = self._stall_dice.random() < self._disturbance.stalls_per_s * seconds
        return self._disturbance.stall_s * self._stall_dice.uniform(0.5, 1.5) if stalls else 0.0
