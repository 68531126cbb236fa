"""Phases of a job: where its time went, over all attempts. The worker records them once, in the field `phases` of the
job's hash; `sluice why` and OpenTelemetry's spans are made of that record."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

PhaseName = Literal["queue", "load", "prepare", "admission", "prefill", "decode", "preempted"]
Moment = Literal["first_token", "preempt", "resume", "takeover", "requeue"]
Mark = PhaseName | Literal["first_token", "finished", "failed", "cancelled"]

_PHASES: tuple[str, ...] = get_args(PhaseName)
_ENDS = ("queue", "finished", "failed", "cancelled")  # of an attempt: it was requeued, or the job has ended


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of one attempt. Times are Unix seconds of the server's clock."""

    name: str
    attempt: int
    worker: str
    began: float
    ended: float | None  # None: it lasts


@dataclass(frozen=True, slots=True)
class Happened:
    """A moment in an attempt."""

    name: Moment
    attempt: int
    worker: str
    at: float


@dataclass(slots=True)
class _Attempt:
    """An attempt at a job."""

    number: int
    worker: str
    lapses: int  # expired leases of the job before it
    marks: list[tuple[str, float]]  # in order: each begins a phase, is the first token, or ends the job

    @property
    def at(self) -> float:
        """Time of the last mark."""
        return self.marks[-1][1]

    @property
    def phase(self) -> str:
        """Name of the current phase."""
        return next(name for name, _ in reversed(self.marks) if name in _PHASES)


@dataclass(slots=True)
class JobPhases:
    """The phases of a job so far. Of more than 16 attempts the last are kept, and of an attempt the first 63 marks and
    its end."""

    _attempts: list[_Attempt] = field(default_factory=list)

    @classmethod
    def read(cls, stored: bytes | None) -> "JobPhases":
        """Read the field of the job's hash. What no worker wrote is the same as nothing."""
        try:
            if not stored or len(stored) > 65_536:
                return cls()
            return cls([_read(*each) for each in json.loads(stored)][-16:])
        except (ValueError, TypeError, RecursionError, OverflowError):
            return cls()

    def as_json(self) -> str:
        """Return the field to store: a list of `[attempt, worker, lapses, [[mark, at], ...]]`."""
        rows = [(each.number, each.worker, each.lapses, each.marks) for each in self._attempts]
        return json.dumps(rows, separators=(",", ":"))

    def begin(self, number: int, worker: str, lapses: int, *, queued_at: float, seen_at: float, now: float) -> None:
        """Begin an attempt, claimed `now`. Its queue begins when the job was queued, or with the last that is known of
        the attempt before it: its last mark, or `seen_at`, its last event."""
        since = queued_at
        if self._attempts:
            now = max(now, self._attempts[-1].at)  # the clock may have been set back
            since = max(self._attempts[-1].at, seen_at)
            if self._attempts[-1].marks[-1][0] == "queue":  # it was requeued
                self._attempts[-1].marks.pop()
        marks = [("queue", round(min(since, now), 6)), ("prepare", round(now, 6))]
        self._attempts = [*self._attempts, _Attempt(number, worker, lapses, marks)][-16:]

    def loaded(self, seconds: float) -> None:
        """Record that the model was loaded in the last seconds of this attempt's queue."""
        (_, queued_at), (_, claimed_at) = self._attempts[-1].marks[:2]
        self._attempts[-1].marks.insert(1, ("load", max(queued_at, round(claimed_at - seconds, 6))))

    def mark(self, name: Mark, at: float) -> None:
        """Record what begins at this time. Marks are in order, even if the clock is set back."""
        last = self._attempts[-1] if self._attempts else None
        if last and len(last.marks) < (64 if name in _ENDS else 63):
            last.marks.append((name, max(last.at, round(at, 6))))

    @property
    def phase(self) -> str:
        """Name of the current phase; empty before the first."""
        return self._attempts[-1].phase if self._attempts else ""

    def phases(self) -> Iterator[Phase]:
        """Yield the phases in order. One ends where the next begins, in the last attempt at its end."""
        for index, each in enumerate(self._attempts):
            bounds = [mark for mark in each.marks if mark[0] != "first_token"]
            if index + 1 < len(self._attempts):
                bounds.append(("", self._attempts[index + 1].marks[0][1]))
            ends = [*(at for _, at in bounds[1:]), None]
            for (name, began), ended in zip(bounds, ends, strict=True):
                if name in _PHASES:
                    yield Phase(name, each.number, each.worker, began, ended)

    def moments(self) -> Iterator[Happened]:
        """Yield what happened, in order."""
        lapses = 0
        for index, each in enumerate(self._attempts):
            claimed_at = next(at for name, at in each.marks if name not in ("queue", "load"))
            if each.lapses > lapses:
                yield Happened("takeover", each.number, each.worker, claimed_at)
            elif index:
                yield Happened("requeue", each.number, each.worker, claimed_at)
            lapses = each.lapses
            yield from self._in_attempt(each)

    def _in_attempt(self, attempt: _Attempt) -> Iterator[Happened]:
        was_preempted = False
        for name, at in attempt.marks:
            if name == "first_token":
                yield Happened("first_token", attempt.number, attempt.worker, at)
            elif name == "preempted":
                yield Happened("preempt", attempt.number, attempt.worker, at)
            elif was_preempted and name in _PHASES and name not in _ENDS:
                yield Happened("resume", attempt.number, attempt.worker, at)
            was_preempted = name == "preempted"

    @property
    def span(self) -> tuple[float, float] | None:
        """Times of the first and the last mark; None without any."""
        if not self._attempts:
            return None
        return self._attempts[0].marks[0][1], self._attempts[-1].at


def _read(number: int, worker: str, lapses: int, marks: Sequence[Sequence[object]]) -> _Attempt:
    """Return an attempt as it was stored. Raises TypeError or ValueError for anything else."""
    read = [(str(name), float(at)) for name, at in marks]  # type: ignore[arg-type]
    if len(read) < 2 or read[0][0] != "queue" or any(not 0 <= at < 1e10 for _, at in read):  # until the year 2286
        raise ValueError("no attempt")
    if all(name in ("queue", "load") for name, _ in read):
        raise ValueError("an attempt that has not begun")
    if not 0 < int(number) < 2**53 or not 0 <= int(lapses) < 2**53:
        raise ValueError("not the number of an attempt")
    return _Attempt(int(number), str(worker)[:128].encode("utf-8", "replace").decode(), int(lapses), read)
