"""Who may come into the engine: by what memory is predicted to be needed, and what was needed so far."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import mlx.core as mx

from worker.engine.rows import Parked
from worker.schedule import classes
from worker.schedule.admission import Decision, Row, Wait, admit_in_turn, by_group, fits, images, lengths
from worker.schedule.budget import MOST
from worker.schedule.classes import Bounds, Decoding, Trial
from worker.schedule.memory import CHUNK, MOST_ROWS, NO_IMAGES, Correction, Costs, Images
from worker.schedule.sequence import Sequence as Asked

_LOOK_EVERY = 64  # steps between two looks at what was needed
# To try bounds takes a few times as long as to decide without, so they are tried at every such decision, and where
# nobody is inside, with the first of the waiting rows.
_TRY_EVERY = 8
_TRIED = 32
_YET_TO_JOIN = -1  # the group of a row whose prompt is on its way


@dataclass(slots=True)
class Candidate:
    sequence: Asked
    parked: Parked | None = None  # where it was, if it decoded before
    passed: int = 0
    was_inside: bool = False

    def forget(self) -> None:
        """Where it was: its cache is computed again when it comes back."""
        if self.parked:
            self.sequence, self.parked = self.parked.row.again(), None


class Entry:
    def __init__(self, costs: Costs, limit: int, rows: int = MOST_ROWS) -> None:
        """`limit`: bytes that the model and all rows may take; `rows`: as many at once."""
        self._costs, self._limit, self._rows, self._correction = costs, limit, rows, Correction()
        self._waiting: dict[str, Candidate] = {}
        self._stirred = False  # somebody came or went since it was last decided
        self._decisions = 0
        self._steps = self._most = 0  # bytes that were predicted at the most since the last look
        self._used = 0  # bytes that were measured at the most since then
        self._plain = 0  # bytes that were predicted for the last step, not corrected
        self._prefixes = 0  # bytes of the prefix cache, at the end of the last step
        self._inside = list[list[int]]()  # lengths at their end, by group, of those who are or come inside
        self._images = NO_IMAGES  # theirs
        self._surplus = 0  # bytes that groups have in their buffers beyond what they were promised
        self.bounds: Bounds = ()  # of the classes that rows decode in
        self.crowded = False  # buffers have to give that back now
        self.spare = limit - costs.resident_bytes  # bytes that no row was promised
        self.longest_chunk = CHUNK  # tokens that a prompt may advance by in one step
        self.promised = 0, max(1, limit - costs.resident_bytes)  # bytes beside the model, and how many there are
        mx.reset_peak_memory()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def parked(self) -> int:
        """Of those who wait, those who were inside before."""
        return sum(each.was_inside for each in self._waiting.values())

    def add(self, sequence: Asked) -> None:
        self._waiting[sequence.id] = Candidate(sequence)
        self.stir()

    def put_back(self, candidate: Candidate) -> None:
        """Before all others of its lane, and with its cache where there is memory for that too."""
        self._waiting = {candidate.sequence.id: candidate, **self._waiting}
        keeping, (promised, room) = self._keeping(), self.promised
        while keeping and promised + self._held() > room:
            keeping.pop().forget()
        self._share()

    def take(self, candidate: Candidate) -> None:
        """It waits no longer."""
        del self._waiting[candidate.sequence.id]

    def remove(self, sequence_id: str) -> None:
        self._waiting.pop(sequence_id, None)
        self.stir()

    def stir(self) -> None:
        """Somebody left: there may be room."""
        self._stirred = True

    @property
    def due(self) -> bool:
        """Whether there is anything to decide."""
        return self._stirred

    def decide(self, running: Sequence[Row], decoding: Decoding) -> list[tuple[Candidate, Decision]]:
        """Who may come in and who never will; until they are taken, they wait with the others. `running` has the oldest
        first."""
        self._stirred = False
        order = sorted(self._waiting.values(), key=lambda candidate: candidate.sequence.lane == "batch")
        rows = [self._row(each) for each in order]
        if not running or self._decisions % _TRY_EVERY == 0:
            self.bounds = self._bounds(rows, running, decoding)
        self._decisions += 1
        rows, running = self._seated(rows, decoding), self._seated(running, decoding)
        decided = self._in_turn(rows, running)
        self._promise(running, decided, decoding)
        return [(self._waiting[row.id], decision) for row, decision in decided if not self._waits(row, decision)]

    def _bounds(self, waiting: Sequence[Row], running: Sequence[Row], decoding: Decoding) -> Bounds:
        """The best ones, if the rows that decode were moved into their classes."""
        costs, tried = self._corrected(), [*islice(waiting, _TRIED)]

        def attempt(bounds: Bounds) -> Trial | None:
            rows, others = ([_classed(row, bounds) for row in each] for each in (running, tried))
            if not fits(rows, costs, self._limit - self._held()):
                return None
            decided = admit_in_turn(others, rows, costs, self._limit, self._rows)
            there = classes.inside(rows, decided)
            return Trial(bounds, [row.tokens for row in there], classes.left(decided))

        def most_rows(tokens: int) -> int:
            return costs.most_rows(tokens, self._limit - self._held())

        everyone = [row.tokens for row in (*running, *waiting)]
        chosen = classes.best(self.bounds, everyone, decoding.cost, attempt, most_rows)
        if chosen != self.bounds and not fits(self._seated(running, decoding, chosen), costs, self._limit):
            return self.bounds  # prompts on their way were let in for them
        return chosen

    def _seated(self, rows: Iterable[Row], decoding: Decoding, bounds: Bounds | None = None) -> list[Row]:
        """The same, each in the group that it decodes in or will."""
        bounds = self.bounds if bounds is None else bounds
        return [
            replace(row, group=decoding.group_of(row.tokens, bounds)) if row.group == _YET_TO_JOIN else row
            for row in rows
        ]

    def _in_turn(self, rows: Sequence[Row], running: Sequence[Row]) -> list[tuple[Row, Decision]]:
        """Of the caches of those who wait, as many are given up as keep somebody out, that of the youngest first."""
        costs, keeping = self._corrected(), self._keeping()
        decided = admit_in_turn(rows, running, costs, self._limit, self._rows)
        if not keeping:
            return decided
        without_caches = [replace(row, held_bytes=0) for row in rows]
        best = _kinds(admit_in_turn(without_caches, running, costs, self._limit, self._rows))
        while _kinds(decided) != best:
            gone = keeping.pop()
            gone.forget()
            rows = [replace(row, held_bytes=0) if row.id == gone.sequence.id else row for row in rows]
            decided = admit_in_turn(rows, running, costs, self._limit, self._rows)
        return decided

    def _promise(self, running: Sequence[Row], decided: list[tuple[Row, Decision]], decoding: Decoding) -> None:
        inside = classes.inside(running, decided)
        self._inside, self._images = lengths(inside), images(inside)
        needed = self._corrected().peak_bytes(self._inside, images=self._images)
        self.promised = needed - self._costs.resident_bytes, self.promised[1]
        groups = by_group(inside)
        surplus = self.unneeded((groups.get(i, ()) for i in range(len(decoding.buffers))), decoding.buffers)
        self.crowded = needed + surplus > self._limit - self._held()
        self._surplus = 0 if self.crowded else surplus
        self._share()

    def _share(self) -> None:
        """What those inside and the caches of those who wait leave: to longer chunks, and then to others."""
        costs, free = self._corrected(), self._limit - self._held() - self._surplus
        self.longest_chunk = costs.longest_chunk(self._inside, free, self._images)
        self.spare = free - costs.peak_bytes(self._inside, min(self.longest_chunk, MOST), self._images)

    def _waits(self, row: Row, decision: Decision) -> bool:
        if isinstance(decision, Wait):
            self._waiting[row.id].passed = decision.passed
        return isinstance(decision, Wait)

    def look(
        self, lengths: list[list[int]], chunk: int, prefixes: int, images: Images = NO_IMAGES, unneeded: int = 0
    ) -> tuple[int, int] | None:
        """Compare what the rows inside were predicted to need, beside the model, with what they did. A step that took
        more corrects predictions at once; now and then they are corrected in either direction, and then the two are
        returned. `chunk`: the tokens of this step's longest one; `images`: those that were looked at in it; `prefixes`:
        bytes of the prefix cache; `unneeded`: see there. The peak of MLX's memory has to be that of the step."""
        self._steps += 1
        used = mx.get_peak_memory() - self._costs.resident_bytes - min(prefixes, self._prefixes)
        self._used, self._prefixes = max(self._used, used), prefixes
        plain = self._costs.beside_bytes(lengths, chunk, images) + self._held() + unneeded
        self._correct(max(plain, self._plain), used)
        self._most, self._plain = max(self._most, plain), plain
        if self._steps % _LOOK_EVERY:
            return None
        most, measured, self._most, self._used = self._most, self._used, 0, 0
        if not most:
            return None
        predicted = round(self._correction.factor * most)
        self._correction = self._correction.saw(most, measured)
        return predicted, measured

    def _correct(self, plain: int, used: int) -> None:
        """`plain`: predicted for this step's rows, or for the last one's: rows that left are in the peak still."""
        corrected = self._correction.exceeded(plain, used)
        if corrected != self._correction:
            self._correction = corrected
            self.stir()

    def unneeded(self, groups: Iterable[Sequence[int]], buffers: Iterable[int]) -> int:
        """Bytes that groups have in their buffers beyond what rows of these lengths are given: some left."""
        given = map(self._costs.rectangle_bytes, groups)
        return sum(max(0, theirs - needed) for theirs, needed in zip(buffers, given, strict=True))

    def left(self, rows: Iterable[Row], decoding: Decoding) -> int:
        """Bytes, if these are all who are inside, in the groups that they would decode in; below 0 where they do not
        fit."""
        rows = self._seated(rows, decoding)
        return self._limit - self._held() - self._corrected().peak_bytes(lengths(rows), images=images(rows))

    def _row(self, candidate: Candidate) -> Row:
        row = self.admitted(candidate.sequence, None, _images_of(candidate.sequence), candidate.passed)
        held_bytes = candidate.parked.kept.nbytes if candidate.parked else 0
        return replace(row, begun=candidate.was_inside, held_bytes=held_bytes)

    def admitted(self, asked: Asked, group: int | None, images: Images = NO_IMAGES, passed: int = 0) -> Row:
        """As admission sees it; a prompt on its way has no `group` yet. Until it is thinned, a prompt that may be takes
        the draft a cache, too. `images`: that it has still to be computed with. All of them stay as they were prepared:
        it may have to be computed again."""
        scored = self._costs.draft_tokens(len(asked.prompt)) if asked.thinning and asked.kept is None else 0
        tokens = len(asked.prompt) - asked.left_out + scored
        group = _YET_TO_JOIN if group is None else group
        return Row(asked.id, asked.lane, tokens, asked.max_tokens, group, passed, images=images + _prepared(asked))

    def _corrected(self) -> Costs:
        return replace(self._costs, factor=self._correction.factor)

    def _keeping(self) -> list[Candidate]:
        """Those who wait with their caches. The youngest is last: it was parked first, and each is put back before."""
        return [each for each in self._waiting.values() if each.parked]

    def _held(self) -> int:
        """Bytes of those who wait with their caches."""
        return sum(each.parked.kept.nbytes for each in self._waiting.values() if each.parked)


def _images_of(asked: Asked) -> Images:
    """All of them, also those that are known: room for the row may be made at the cost of what is known of them."""
    tokens = {picture.digest: picture.tokens for picture in asked.pictures}.values()
    longest = max(tokens, default=0)
    return Images(longest, sum(tokens), longest)


def _prepared(asked: Asked) -> Images:
    each = {picture.digest: picture.nbytes for picture in asked.pictures}.values()
    return Images(prepared_bytes=sum(each))


def _classed(row: Row, bounds: Bounds) -> Row:
    return replace(row, group=classes.class_of(row.tokens, bounds))


def _kinds(decided: Iterable[tuple[Row, Decision]]) -> list[type[Decision]]:
    return [type(decision) for _, decision in decided]
