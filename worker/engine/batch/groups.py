"""The decoding rows, in groups of similar length."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from worker.engine.admission.classes import Bounds, Decoding, class_of
from worker.engine.admission.grouping import MeasuredCost, place, regroup
from worker.engine.batch.decode_batch import ComputedRow, DecodeBatch, PreemptedRow
from worker.engine.batch.row import Row, StepToken
from worker.engine.isolation import failures, isolate
from worker.engine.speculation.mtp import Network
from worker.engine.speculation.speculator import Speculator
from worker.engine.step.planner import GapLimit


class Stopwatch:
    """A step runs on the device while the host continues, so its start is not always known. It is known if the device
    was idle and the step was then waited for, or if the step directly followed another; other steps are not timed."""

    def __init__(self) -> None:
        self._launched_at: float | None = None  # of the running step, if the device was idle
        self._ended_at: float | None = None  # of the step before it, if the next followed directly
        self._verified_at: float | None = None  # the end of the last step, if that has verified drafts
        self.running = False

    def launched(self, began: float) -> float | None:
        """Record that a step was launched and that the one before it has just ended. Returns the seconds that the
        earlier step took, or None if unknown. `began`: time.perf_counter() before the launch."""
        now = time.perf_counter()
        taken = now - self._ended_at if self._ended_at else None
        self._launched_at, self._ended_at = (None, now) if self.running else (began, None)
        self._verified_at = None
        self.running = True
        return taken

    def ended(self) -> float | None:
        """Record that the running step has ended and that the device is idle. Returns its seconds, or None if
        unknown."""
        taken = time.perf_counter() - self._launched_at if self._launched_at else None
        self._launched_at = self._ended_at = None
        self.running = False
        return taken

    def verified(self) -> None:
        """Record that a step has ended in which all rows have verified drafts: the device is idle."""
        self._verified_at = time.perf_counter()

    def take_host_s(self) -> float:
        """Return the seconds of the host's work since the last step, if that has verified drafts; else 0, and if called
        again. They are a part of the next step, if that verifies drafts too: the device waits for it."""
        since, self._verified_at = self._verified_at, None
        return time.perf_counter() - since if since else 0.0

    def invalidate(self) -> None:
        """Discard the pending measurement: the device does other work during the running step or before the next."""
        self._launched_at = self._ended_at = self._verified_at = None


_Collect = Callable[[DecodeBatch], list[StepToken]]


class Groups:
    """All decoding rows, in groups that each decode in one forward. For the engine's thread.

    If a group fails, only its rows are affected: they are removed, and their caches are lost. See `pop_lost`. If the
    device fails, the rows of all groups are, unless these were waited for one after the other."""

    def __init__(
        self, network: Network, make_room: Callable[[list[list[Row]]], bool], speculator: Speculator | None = None
    ) -> None:
        """`make_room(groups)`: make room for the active rows when these rows decode in these groups; return False if
        memory is too small for that. A row in a group of its own takes the least memory, so a row for which no group
        has room gets one. `speculator`: decides about drafts; None: no drafts."""
        self.speculator = speculator or Speculator()
        self._new_group = partial(DecodeBatch, network, self.speculator.max_draft)
        self._make_room = make_room
        self._cost = MeasuredCost()
        self._stopwatch = Stopwatch()
        self._groups: list[DecodeBatch] = []
        self._excused = failures.device  # that were not a decode step's
        self._idle = True  # the device has computed all that the groups have launched
        self._lost: dict[Row, None] = {}  # rows without a cache, because a failure has lost it; an ordered set
        self._bounds: Bounds = ()  # of the length classes, whose rows decode in separate groups
        self._launched_lengths: list[list[int]] = []  # lengths by group in the running step; empty if not measured
        self._measured: tuple[int, float] = (0, 0.0)  # rows and seconds of a step, until they are taken
        self._steps, self._balanced = 0, True  # balanced: `rebalance` has nothing to do yet
        self._filled_at = 0.0  # the time at which the first of the rows joined

    def __len__(self) -> int:
        return sum([len(group.rows) for group in self._groups])

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        """Yield (group number, row) for each row."""
        return ((number, row) for number, group in enumerate(self._groups) for row in group.rows)

    @property
    def num_interactive(self) -> int:
        """Number of interactive rows."""
        return sum(row.request.lane == "interactive" for _, row in self)

    @property
    def started(self) -> bool:
        """True if a row's answer has begun: a pause would be noticed."""
        return any(group.started for group in self._groups)

    @property
    def starting(self) -> bool:
        """True if the running step draws the first token of an answer."""
        return any(group.starting for group in self._groups)

    @property
    def ending(self) -> bool:
        """True if there are rows, and each has drawn the last token of its answer: no step is left to launch."""
        return bool(self._groups) and all(group.ending for group in self._groups)

    @property
    def joined_s(self) -> float:
        """Seconds since the first of the rows joined."""
        return time.perf_counter() - self._filled_at

    @property
    def buffers(self) -> list[int]:
        """Allocated bytes of the caches, by group, those of networks that draft included."""
        return [group.nbytes + self.speculator.nbytes_of(group) for group in self._groups]

    def step(self, gap: GapLimit | None = None) -> tuple[list[StepToken], list[Row]]:
        """Launch the next decode step of all groups, return the tokens of the last one that are not known yet, and the
        rows that failed in a group of their own: they cause the failure, and are removed. If a group of several rows
        failed, these are lost. Blocks until the last step has ended, or this one for groups that verify drafts: they
        return its tokens too. `gap`: limit of what drafts may add; None: no limit."""
        self._lose_doubtful()
        suspects = any(row.runs_alone for _, row in self)
        if suspects:
            self.wait()
        began = time.perf_counter()
        self._idle = False
        lengths = [] if self.step_copy_bytes else self.lengths  # a step that copies buffers is not usual
        self._steps += 1
        self._balanced = self._balanced and self._steps % 32 > 0  # see `rebalance`
        groups = [*self._groups]
        drafted = list[DecodeBatch]()
        with isolate("the choice of drafts"):
            drafted = self.speculator.choose_groups(groups, gap)
        self.speculator.begin_step(self._stopwatch.take_host_s() if len(drafted) < len(groups) else 0.0)
        for group in groups:
            if group not in drafted and (suspects or not self._is_doubtful):
                with self._isolate(group, "the launch of a decode step"):
                    group.launch()
                    if suspects:  # an error is of this group then
                        group.wait()
        launched = [group for group in self._groups if group not in drafted]
        tokens, plain = self._verify(drafted, running=bool(launched), apart=suspects) if drafted else ([], [])
        tokens += self._collect(DecodeBatch.collect, launched + plain, apart=suspects)
        if suspects:
            self._excused = failures.device
        elif self._lose_doubtful():
            return [], []
        # A row whose drafts may be the cause is recomputed, and takes none then.
        failed = self._failed_alone([group for group in groups if group not in drafted])
        self._record(self._stopwatch.launched(began) if launched + plain else self._stopwatch.ended())
        self._launched_lengths = lengths if len(groups) == len(self._groups) and not drafted else []
        return tokens, failed

    def _verify(
        self, drafted: Sequence[DecodeBatch], *, running: bool, apart: bool
    ) -> tuple[list[StepToken], list[DecodeBatch]]:
        """Verify drafts in these groups, and return the tokens to deliver and the groups that have launched a plain
        step instead, if no draft is worthwhile. `running`: other groups have launched a step. `apart`: see
        `_collect`."""
        tokens, plain = list[StepToken](), list[DecodeBatch]()
        for group in drafted:
            if self._is_doubtful and not apart:
                break
            with self._isolate(group, "the verification of drafts"):
                inputs = group.read_inputs()
                if not running:
                    self._record(self._stopwatch.ended())
                verified = self.speculator.verify(group, inputs, None if running else self._stopwatch.take_host_s())
                tokens += verified or ()
                if verified is None:
                    self.speculator.launch_plain(group)
                    plain, running = [*plain, group], True
        self._stopwatch.invalidate() if running else self._stopwatch.verified()
        return tokens, plain

    def collect_drawn(self) -> tuple[list[StepToken], list[Row]]:
        """Return the tokens that the running step draws before they are fed, and failed rows as `step` does. Blocks
        until the step has ended."""
        self._lose_doubtful()
        groups = [*self._groups]
        tokens = self._collect(DecodeBatch.collect_drawn, groups)
        self._record(self._stopwatch.ended())
        return ([], []) if self._lose_doubtful() else (tokens, self._failed_alone(groups))

    def _collect(self, collect: _Collect, groups: Sequence[DecodeBatch], *, apart: bool = False) -> list[StepToken]:
        """`apart`: each group was waited for, so an error is its own. Otherwise nothing is read after one: grammars
        would accept what a failed step has drawn."""
        tokens = list[StepToken]()
        for group in [group for group in groups if group in self._groups]:
            if self._is_doubtful and not apart:
                break
            with self._isolate(group, "a decode step"):
                tokens += collect(group)
        return tokens

    def _failed_alone(self, before: Sequence[DecodeBatch]) -> list[Row]:
        """Return the rows that failed alone, which are lost no longer. `before`: the groups before the failures."""
        if not self._lost:
            return []
        alone = [group.rows[0] for group in before if group not in self._groups and len(group.rows) == 1]
        for row in alone:
            del self._lost[row]
        return alone

    def pop_lost(self) -> list[Row]:
        """Return the rows that have lost their caches since the last call. They are in no group, and can only be
        recomputed; rows that were removed meanwhile may be among them."""
        self._lose_doubtful()
        if not self._lost:  # in nearly every part of a step
            return []
        lost, self._lost = [*self._lost], {}
        return lost

    def wait(self) -> None:
        """Block until the running step has ended, so that it and the next work of the device can be timed, and told
        apart if the device fails."""
        for group in [*self._groups]:
            with self._isolate(group, "waiting for a decode step"):
                group.wait()
        if self._stopwatch.running:
            self._record(self._stopwatch.ended())
        self._stopwatch.invalidate()
        self._idle = not self._lose_doubtful()

    def excuse_failures(self) -> None:
        """Keep the rows although the device has failed at other work, if nothing of theirs was in progress."""
        if self._idle:
            self._excused = failures.device

    @property
    def _is_doubtful(self) -> bool:
        """True if the device has failed, and maybe at a decode step: see `isolate`."""
        return failures.device != self._excused

    def _lose_doubtful(self) -> bool:
        """Lose all rows, and return True, if what they have drawn is doubtful."""
        doubtful, self._excused = self._is_doubtful, failures.device
        if doubtful:
            self.clear()
        return doubtful

    def _record(self, seconds: float | None) -> None:
        """Record the seconds of the running step, unless they are unknown."""
        if seconds is not None and self._launched_lengths:
            self._cost.observe(self._launched_lengths, seconds)
            self._measured = sum(map(len, self._launched_lengths)), seconds
            for rows, group_s in self._cost.divided(self._launched_lengths, seconds):
                self.speculator.observe_plain(rows, group_s)

    @property
    def step_s(self) -> float:
        """Expected seconds of the next decode step of the present rows without drafts; 0 before any is measured."""
        return self._cost.expected_s(self.lengths)

    def take_measured(self) -> tuple[int, float]:
        """Return the rows and the seconds of the last step without drafts if it was measured since the last call;
        else zeros."""
        measured, self._measured = self._measured, (0, 0.0)
        return measured

    @property
    def most_measured(self) -> int:
        """Most rows of a decode step without drafts that was measured."""
        return self._cost.most_rows

    @property
    def step_copy_bytes(self) -> int:
        """Bytes of buffers that are copied in the next decode step, since they are full."""
        return sum(group.step_copy_bytes for group in self._groups)

    @property
    def forward_s(self) -> float:
        """Estimated seconds of a step of a single row without cached tokens."""
        return self._cost.cost().rows_s(1, 0)

    @property
    def lengths(self) -> list[list[int]]:
        """Current lengths of the rows in tokens, by group."""
        return [group.lengths for group in self._groups]

    def decoding(self, groups: Sequence[Sequence[Row]] | None = None) -> Decoding:
        """Return the state of the groups for admission. `groups`: rows to describe as if they decoded in these groups,
        without buffers; None: the present groups."""
        rows = [group.rows for group in self._groups] if groups is None else groups
        lengths = [[row.length for row in group] for group in rows]
        ends = [[row.end for row in group] for group in rows]
        return Decoding(self._cost.cost(), lengths, ends, self.buffers if groups is None else ())

    def set_bounds(self, bounds: Bounds) -> None:
        """Set the bounds of the length classes. Rows of different classes join different groups from now on; rows that
        decode already are moved by `rebalance`, if that makes steps faster."""
        self._balanced = self._balanced and bounds == self._bounds
        self._bounds = bounds

    def tighten(self) -> None:
        """Free memory that buffers still occupy. Blocks. The rows of a group that fails are lost."""
        self._stopwatch.invalidate()
        for group in [*self._groups]:
            with self._isolate(group, "tightening the buffers of a group"):
                group.tighten()

    def join_copy_bytes(self, length: int) -> int:
        """Return the bytes of existing buffers that are copied when a row of `length` tokens joins."""
        index = place(length, self.lengths, self._cost.cost())
        return self._groups[index].join_copy_bytes(length) if index < len(self._groups) else 0

    def added_step_s(self, length: int) -> float:
        """Return the expected seconds that a decode step takes longer once a row of `length` tokens has joined."""
        return self._cost.added_s(self.lengths, length)

    def cache_of(self, row: Row) -> Iterator[tuple[list[Any], int]]:
        """Yield the cache that holds the row, and the row's index in it, if it decodes. Reading the cache blocks."""
        self._lose_doubtful()  # maybe at the copy of another row
        self._stopwatch.invalidate()
        return (group.cache_of(row) for group in self._groups if row in group.rows)

    def add(self, computed: Sequence[ComputedRow]) -> None:
        """Add rows to groups, or to new ones. Blocks. If it raises, some of them may have been added."""
        self._stopwatch.invalidate()
        self._balanced, self._idle = False, False
        self._filled_at = self._filled_at if len(self) else time.perf_counter()
        joining: dict[DecodeBatch, list[ComputedRow]] = {}
        for each in computed:
            planned = {group: [other.row for other in others] for group, others in joining.items()}
            joining.setdefault(self._group_for(each.row, planned), []).append(each)
        for group, rows in joining.items():
            group.add(rows)
            self.speculator.join((each.row.id, each.entries) for each in rows)
            self._track(group)

    def restore(self, preempted: PreemptedRow) -> None:
        """Add a preempted row to a group, or to a new one. Blocks. If it raises, the row is lost."""
        self._stopwatch.invalidate()
        with self._in_transit(preempted.row):
            group = self._group_for(preempted.row)
            group.restore(preempted)
        self._track(group)

    def preempt(self, row: Row) -> PreemptedRow:
        """Remove a decoding row, and return it with a copy of its cache. Blocks. If it raises, the row is lost, and the
        groups must be cleared."""
        self._stopwatch.invalidate()
        with self._in_transit(row):
            preempted = self._group_of(row).preempt(row)
            self.speculator.leave(row)
        self._drop_empty()
        return preempted

    def move(self, row: Row) -> None:
        """Move a row, if it decodes beside others, to a group that has room for it, or to a new one. Blocks. If it
        raises, the row is lost, and the groups must be cleared."""
        source = next((group for group in self._groups if row in group.rows), None)
        if source is None or len(source.rows) == 1:
            return
        self._stopwatch.invalidate()
        self._balanced = False
        with self._in_transit(row):
            preempted = source.preempt(row)
            self.speculator.leave(row)
            self.tighten()  # the row left a place that is as long as the group's longest
            group = self._group_for(row)
            group.restore(preempted)
        self._track(group)

    def remove(self, removed: Collection[Row]) -> None:
        """Remove rows; those that do not decode are ignored. If a group fails to remove its rows, all its rows are
        lost. Blocks."""
        if removed:
            self._stopwatch.invalidate()
        for group in [*self._groups]:
            if leaving := [row for row in group.rows if row in removed]:
                with self._isolate(group, "removing rows from a group"):
                    group.remove(leaving)
        self._drop_empty()

    def clear(self) -> None:
        """Drop the caches of all rows, which are lost."""
        self._stopwatch.invalidate()
        for group in [*self._groups]:
            self._lose(group)

    def rebalance(self) -> None:
        """Move rows to other groups if that makes steps faster and fits into memory. Checks every 32 steps,
        after rows have joined, and after the bounds have changed. Blocks if rows are moved. If it raises, the groups
        must be cleared."""
        if self._balanced:
            return
        self._balanced = True
        trusted = [group for group in self._groups if not any(row.runs_alone for row in group.rows)]
        classes = [class_of(row.end, self._bounds) for group in trusted for row in group.rows]
        better = regroup([group.lengths for group in trusted], self._cost.cost(), classes)
        rows = [row for group in trusted for row in group.rows]
        targets = [[rows[i] for i in group] for group in better or ()]
        moves = [*_destinations(targets, trusted, self._new_group)]
        if not moves or not self._make_room(_meanwhile(moves, trusted)):
            return
        self._stopwatch.invalidate()
        for destination, members in moves:
            for row in members:
                if row not in destination.rows:
                    with self._in_transit(row):
                        self.speculator.leave(row)
                        destination.restore(self._group_of(row).preempt(row))
                    self._track(destination)
        self._drop_empty()

    def _group_for(self, row: Row, joining: Mapping[DecodeBatch, list[Row]] = MappingProxyType({})) -> DecodeBatch:
        """Return the group for a row, of its length class, or a new one. One that runs alone always gets a new one.
        `joining`: rows that are about to join these groups, of which some may be new."""
        rows_of = {group: [*group.rows, *joining.get(group, ())] for group in dict.fromkeys([*self._groups, *joining])}
        trusted = {group: rows for group, rows in rows_of.items() if not any(each.runs_alone for each in rows)}
        same_class = self.decoding([*trusted.values()]).of_class(class_of(row.end, self._bounds), self._bounds)
        groups = [] if row.runs_alone else [[*trusted][i] for i in same_class]
        index = place(row.length, [[each.length for each in trusted[group]] for group in groups], self._cost.cost())
        if index == len(groups):
            return self._new_group()
        after = [[*rows, *([row] if group is groups[index] else [])] for group, rows in trusted.items()]
        return groups[index] if self._make_room(after) else self._new_group()

    def _group_of(self, row: Row) -> DecodeBatch:
        return next(group for group in self._groups if row in group.rows)

    def _track(self, group: DecodeBatch) -> None:
        """Append a group that has its first row now."""
        if group not in self._groups:
            self._groups.append(group)

    def _drop_empty(self) -> None:
        self._groups = [group for group in self._groups if group.rows]

    def _isolate(self, group: DecodeBatch, action: str) -> AbstractContextManager[object]:
        """Lose the rows of the group, and no others, if the body raises."""
        return isolate(f"{action} of {len(group.rows)} rows", partial(self._lose, group))

    def _lose(self, group: DecodeBatch) -> None:
        self._groups.remove(group)
        self._lost |= dict.fromkeys(group.rows)

    @contextmanager
    def _in_transit(self, row: Row) -> Iterator[None]:
        """Count a row as lost unless the body succeeds: while it moves, it may be in no group."""
        self._lost[row] = None
        yield
        del self._lost[row]


def _destinations(
    targets: list[list[Row]], groups: list[DecodeBatch], create: Callable[[], DecodeBatch]
) -> Iterator[tuple[DecodeBatch, list[Row]]]:
    """Yield the batch for each target group: of the present `groups` the one that holds most of its rows, or a new one
    by `create`."""
    for members in sorted(targets, key=len, reverse=True):
        destination = max(groups, key=lambda group: sum(row in group.rows for row in members), default=None)
        if destination is None or not any(row in destination.rows for row in members):
            destination = create()
        else:
            groups = [group for group in groups if group is not destination]
        yield destination, members


def _meanwhile(moves: Sequence[tuple[DecodeBatch, list[Row]]], groups: Sequence[DecodeBatch]) -> list[list[Row]]:
    """Return the rows of each group at the most while rows move: a group that gains some may not have lost others yet,
    and one that loses all of them is large until the last has left. `moves`: the rows that each group will have."""
    gaining = [list(dict.fromkeys([*destination.rows, *members])) for destination, members in moves]
    kept = [destination for destination, _ in moves]
    return gaining + [group.rows for group in groups if group not in kept and len(group.rows) > 1]
