"""The decoding rows, in groups of similar length."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import mlx.nn as nn

from worker.engine.batch.decode_batch import DecodeBatch, PendingTokens, PreemptedRow, StepToken
from worker.engine.batch.row import Row
from worker.engine.batch.timing import Stopwatch
from worker.schedule.classes import Bounds, Decoding, class_of
from worker.schedule.grouping import MeasuredCost, place, regroup

logger = logging.getLogger("sluice.engine")

T = TypeVar("T")

_LOOK_EVERY = 32  # steps, until it is looked at again whether other groups would be faster


class Groups:
    def __init__(self, network: nn.Module, fit: Callable[[list[list[Row]]], bool]) -> None:
        """`fit`: whether rows in such groups stay within memory. Rows in groups of their own take the least."""
        self._network, self._fit, self._cost, self._stopwatch = network, fit, MeasuredCost(), Stopwatch()
        self._groups: list[DecodeBatch] = []
        self._bounds: Bounds = ()  # of the classes that are kept apart
        self._under_way: list[list[int]] = []  # lengths, by group, in the step that the device computes
        self._steps, self._balanced = 0, True  # it is not yet time to look at the groups again
        self.step_s: float | None = None  # of a decode step, if one could be timed since the last `step` began

    def __len__(self) -> int:
        return sum(len(group.rows) for group in self._groups)

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        """Each row, and the number of its group."""
        return ((number, row) for number, group in enumerate(self._groups) for row in group.rows)

    @property
    def nbytes(self) -> int:
        return sum(self.buffers)

    @property
    def buffers(self) -> list[int]:
        """Bytes, by group."""
        return [group.nbytes for group in self._groups]

    def step(self) -> tuple[list[StepToken], list[list[Row]]]:
        """Return the rows' tokens, and the rows of each group that failed: these are removed and their caches lost.

        All groups are launched before the first is waited for."""
        began, lengths = time.perf_counter(), self.lengths
        self._steps, self.step_s = self._steps + 1, None
        self._balanced = self._steps % _LOOK_EVERY > 0
        launched = [group for group in self._groups if _tried(group.launch)]
        told, sound = list[StepToken](), list[DecodeBatch]()
        for group in launched:
            for news in _tried(group.collect):
                told += news
                sound.append(group)
        failed = [group.rows for group in self._groups if group not in sound]
        self._groups = sound
        self._learn(self._stopwatch.launched(began))
        self._under_way = [] if failed else lengths
        return told, failed

    @property
    def idle(self) -> bool:
        """True if no step is running on the device."""
        return not self._stopwatch.running

    def wait(self) -> None:
        """Block until the running step has ended, so that it and the next work of the device can be timed."""
        if self._stopwatch.running and all(_tried(group.wait) for group in self._groups):
            self._learn(self._stopwatch.ended())

    def _learn(self, seconds: float | None) -> None:
        if seconds is not None and self._under_way:
            self._cost.observe(self._under_way, seconds)
            self.step_s = seconds

    @property
    def forward_s(self) -> float:
        """Estimated seconds of a step of a single row without cached tokens."""
        return self._cost.cost().of(1, 0)

    @property
    def lengths(self) -> list[list[int]]:
        return [group.lengths for group in self._groups]

    def decoding(self, groups: Sequence[Sequence[Row]] | None = None) -> Decoding:
        """The groups as admission sees them, or these as if they decoded."""
        rows = [group.rows for group in self._groups] if groups is None else groups
        lengths, ends = ([[at(row) for row in group] for group in rows] for at in (_length, _end))
        return Decoding(self._cost.cost(), lengths, ends, self.buffers if groups is None else ())

    def part(self, bounds: Bounds) -> None:
        """Rows of different classes join different groups from here on. Those that decode are moved only if it pays."""
        self._balanced = self._balanced and bounds == self._bounds
        self._bounds = bounds

    def tighten(self) -> None:
        """Give back what buffers have beyond their room to spare: others need it."""
        self._stopwatch.invalidate()
        for group in list(self._groups):
            if not _tried(group.tighten):
                self._groups.remove(group)

    def decode_slowdown(self, more: int) -> float:
        """Return the factor by which a step becomes slower with `more` rows of the longest row's length. Extrapolates
        to at most twice the current number of rows."""
        cost, lengths, more = self._cost.cost(), self.lengths, min(more, len(self))
        longest = max((length for group in lengths for length in group), default=0)
        return 1 + more * (cost.row_s + longest * cost.cell_s) / max(cost.step_s(lengths), 1e-9)

    def join_copy_bytes(self, length: int) -> int:
        """Bytes that are copied when a row of that length joins, beside its own."""
        at = place(length, self.lengths, self._cost.cost())
        return self._groups[at].join_copy_bytes(length) if at < len(self._groups) else 0

    def cache_of(self, row: Row) -> Iterator[tuple[list[Any], int]]:
        """The cache that it is in, if it is in one, and its place there. To read it waits for the step under way."""
        self._stopwatch.invalidate()
        return (group.cache_of(row) for group in self._groups if row in group.rows)

    def add(self, row: Row, cache: list[Any], drawn: PendingTokens, position: int | None = None) -> None:
        self._stopwatch.invalidate()
        group = self._group_for(row)
        group.add(row, cache, drawn, position)
        self._open(group)

    def restore(self, parked: PreemptedRow) -> None:
        self._stopwatch.invalidate()
        group = self._group_for(parked.row)
        group.restore(parked)
        self._open(group)

    def preempt(self, row: Row) -> PreemptedRow:
        self._stopwatch.invalidate()
        parked = self._group_of(row).preempt(row)
        self._sweep()
        return parked

    def remove(self, gone: Collection[Row]) -> None:
        """A group that fails to let them go is given up, and its other rows are here no more."""
        if gone:
            self._stopwatch.invalidate()
        for group in list(self._groups):
            theirs = [row for row in group.rows if row in gone]
            if theirs and not _tried(partial(group.remove, theirs)):
                self._groups.remove(group)
        self._sweep()

    def clear(self) -> None:
        """Remove all rows and drop their caches."""
        self._stopwatch.invalidate()
        self._groups = []

    def rebalance(self) -> None:
        """Move rows, now and then, to where they decode faster, if it pays."""
        if self._balanced:
            return
        self._balanced = True
        trusted = self._trusted()
        kinds = [class_of(row.end, self._bounds) for group in trusted for row in group.rows]
        better = regroup([group.lengths for group in trusted], self._cost.cost(), kinds)
        if better is None:
            return
        rows = [row for group in trusted for row in group.rows]
        targets = [[rows[i] for i in group] for group in better]
        if not self._fit(targets):
            return
        self._stopwatch.invalidate()
        for home, members in self._homes(targets, trusted):
            for row in members:
                if row not in home.rows:
                    home.restore(self._group_of(row).preempt(row))
                    self._open(home)
        self._sweep()

    def _homes(self, targets: list[list[Row]], groups: list[DecodeBatch]) -> Iterator[tuple[DecodeBatch, list[Row]]]:
        """The group that each is put together in: the one that holds most of them, or a new one."""
        for members in sorted(targets, key=len, reverse=True):
            home = max(groups, key=lambda group: sum(row in group.rows for row in members), default=None)
            if home is None or not any(row in home.rows for row in members):
                home = DecodeBatch(self._network)
            else:
                groups = [group for group in groups if group is not home]
            yield home, members

    def _group_for(self, row: Row) -> DecodeBatch:
        """One of its class. A suspect gets one of its own."""
        trusted = self._trusted()
        groups = [] if row.suspect else self._of_class(row, trusted)
        at = place(row.length, [group.lengths for group in groups], self._cost.cost())
        if at == len(groups):
            return DecodeBatch(self._network)
        together = [[*group.rows, *([row] if group is groups[at] else [])] for group in trusted]
        return groups[at] if self._fit(together) else DecodeBatch(self._network)

    def _of_class(self, row: Row, groups: list[DecodeBatch]) -> list[DecodeBatch]:
        number, decoding = class_of(row.end, self._bounds), self.decoding([group.rows for group in groups])
        return [groups[i] for i in decoding.of_class(number, self._bounds)]

    def _trusted(self) -> list[DecodeBatch]:
        return [group for group in self._groups if not any(row.suspect for row in group.rows)]

    def _group_of(self, row: Row) -> DecodeBatch:
        return next(group for group in self._groups if row in group.rows)

    def _open(self, group: DecodeBatch) -> None:
        """It has a row now, if it had none before."""
        if group not in self._groups:
            self._groups.append(group)

    def _sweep(self) -> None:
        self._groups = [group for group in self._groups if group.rows]


def _length(row: Row) -> int:
    return row.length


def _end(row: Row) -> int:
    return row.end


def _tried(act: Callable[[], T]) -> list[T]:
    """Return a list with the result, or an empty list if the call failed: a failure must affect only its group."""
    try:
        return [act()]
    except Exception:
        logger.exception("a step failed")
        return []
