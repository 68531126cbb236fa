"""Drafts copied from earlier text of the row, or from its prediction, where its present ending occurred before."""

from array import array
from collections.abc import Iterator, Sequence

from worker.engine.speculation.offer import Acceptance, DraftedRow, Kind, Offer, Proposer
from worker.engine.speculation.tuning import INDEXED_PER_OFFER, INDEXED_PER_STEP, MAX_AGREEMENT, WINDOW
from worker.outcomes import MAX_DRAFT, PREDICTION

COPY = "copy"


class NgramIndex:
    """A token sequence that grows, and an index of its n-grams, as in LZ77: a hash table of the last position of each,
    and a chain to the position before. A position is the index of a token, and stands for the tokens before it.

    Indexing a token and a lookup each take constant time. Takes 4 bytes a token for the tokens, 4 for the chain and 4
    to 8 for the table, which covers at most `2 * window` tokens: beyond, the first half is dropped."""

    def __init__(self, tokens: Sequence[int], size: int, window: int) -> None:
        """`size`: tokens of an n-gram. `window`: the last tokens that can always be found again."""
        self.tokens = array("i", tokens[-window:])
        self._size, self._window = size, window
        self._begin()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def behind(self) -> int:
        """Number of tokens that are not indexed yet."""
        return len(self.tokens) - len(self._previous)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens and of the index."""
        return sum(each.itemsize * len(each) for each in (self.tokens, self._previous, self._last))

    def extend(self, tokens: Sequence[int]) -> bool:
        """Append tokens to the sequence. Does not index them. Returns True if others were dropped: all positions have
        changed."""
        self.tokens.extend(tokens)
        kept = len(self.tokens) % self._window + self._window
        if kept >= len(self.tokens):
            return False
        del self.tokens[:-kept]
        self._begin()
        return True

    def catch_up(self, most: int) -> int:
        """Index up to `most` more tokens, and return their number."""
        start = len(self._previous)
        end = min(len(self.tokens), start + most)
        first = min(max(start, self._size), end)
        self._previous.extend([-1] * (first - start))  # too few tokens come before these positions
        last, previous = self._last, self._previous
        mask = len(last) - 1
        for position, gram in enumerate(self._grams(first, end), first):
            slot = hash(gram) & mask
            previous.append(last[slot])
            last[slot] = position
        if end > 4 * len(self._last):  # crowded: built anew, larger
            self._begin()
        return end - start

    def _grams(self, first: int, end: int) -> Iterator[tuple[int, ...]]:
        """Yield the n-gram before each of these positions."""
        return zip(*(self.tokens[first - back : end - back] for back in range(self._size, 0, -1)), strict=True)

    def positions(self, context: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield indexed positions whose preceding tokens agree with the end of `context` in an n-gram at least, the
        most recent first, each with the number of tokens that agree, up to `MAX_AGREEMENT`."""
        if len(context) < self._size:
            return
        gram = tuple(context[len(context) - self._size :])
        position = self._last[hash(gram) & len(self._last) - 1]
        for _ in range(8):  # candidates
            if position < 0:
                return
            if (agreeing := agreement(self.tokens, position, context)) >= self._size:
                yield position, agreeing
            position = self._previous[position]

    def _begin(self) -> None:
        """Begin an empty index, of a size that fits the sequence."""
        slots = max(1 << 10, 1 << len(self.tokens).bit_length())
        self._last = array("i", [-1]) * slots  # the last position of each slot
        self._previous = array("i")  # by position: the position before it in the same slot, or -1


def agreement(tokens: Sequence[int], position: int, context: Sequence[int]) -> int:
    """Return the number of tokens before `position` that equal the end of `context`, up to `MAX_AGREEMENT`."""
    most = min(MAX_AGREEMENT, position, len(context))
    end = len(context)
    for count in range(most):
        if tokens[position - 1 - count] != context[end - 1 - count]:
            return count
    return most


class CopyProposer(Proposer):
    """Offers what has followed the longest known ending of a row earlier in its prompt or answer, or in its prediction.

    Drawn tokens are compared with those that would have been offered, verified or not, so acceptance is learned
    without forwards."""

    def __init__(self) -> None:
        self._shared = Acceptance(_prior)
        self._rows = dict[str, _RowCopies]()
        self._turn = 0

    def begin_step(self, rows: Sequence[DraftedRow]) -> bool:
        """Index a part of the rows' texts, row by row. Returns True if something may be left."""
        left = INDEXED_PER_STEP
        for _ in rows:
            self._turn = (self._turn + 1) % len(rows)
            left -= self._followed(rows[self._turn]).index(left)
            if left <= 0:
                return True
        return False

    def offer(self, row: DraftedRow) -> Offer | None:
        """Return a draft after the row's last token, or None if its ending is new."""
        return self._followed(row).offer()

    def _followed(self, row: DraftedRow) -> "_RowCopies":
        """Return the texts of a row, with its answer up to now."""
        copies = self._rows.get(row.id)
        if copies is None or copies.answered > len(row.answer):
            copies = self._rows[row.id] = _RowCopies(row, self._shared)
        if copies.answered < len(row.answer):
            copies.extend(row.answer[copies.answered :])
        return copies

    def forget(self, row: DraftedRow) -> None:
        """Free the row's index."""
        self._rows.pop(row.id, None)


class _RowCopies:
    """The texts that one row may copy from."""

    def __init__(self, row: DraftedRow, shared: Acceptance) -> None:
        # Following a long answer, of a row that resumes, token by token would delay the step.
        answer = row.answer if len(row.answer) > INDEXED_PER_OFFER else ()
        prediction = row.request.prediction
        gram = 2  # tokens of the shortest ending that is looked up: a single one occurs by chance
        own = NgramIndex([*row.request.prompt[-WINDOW:], *answer[-WINDOW:]], gram, WINDOW)
        self._acceptance = shared.of_row()
        self._text = own
        self._sources = [_Source(COPY, own, own)]
        if prediction:
            expected = NgramIndex(prediction[:WINDOW], gram, WINDOW)
            self._sources.append(_Source(PREDICTION, expected, own, position=None if answer else 0))
        self.answered = len(answer)  # tokens of the answer that are in the text

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that were drawn, and learn from them up to the first that was expected wrongly."""
        self.answered += len(tokens)
        for number, token in enumerate(tokens):
            following = [source for source in self._sources if source.position is not None]
            if not following:
                self._text.extend(tokens[number:])
                return
            for source in following:
                self._acceptance.observe(source.kind, source.expected == token)
            dropped = self._text.extend((token,))
            for source in following:
                source.advance(token, dropped=dropped)

    def index(self, most: int) -> int:
        """Index up to `most` tokens, and return their number."""
        return sum(source.index(most // len(self._sources)) for source in self._sources)

    def offer(self) -> Offer | None:
        """Return the draft of the likelier source."""
        for source in self._sources:
            source.index(INDEXED_PER_OFFER)
            source.look_up()
        found = [source for source in self._sources if source.position is not None]
        if not found:
            return None
        source = max(found, key=lambda source: self._acceptance.rate(source.kind))
        tokens, rate = source.draft(MAX_DRAFT), self._acceptance.rate(source.kind)
        return Offer(source.name, tokens, (rate,) * len(tokens)) if tokens else None


class _Source:
    """A text to copy from, and the position in it that the row's ending leads to."""

    def __init__(self, name: str, index: NgramIndex, context: NgramIndex, position: int | None = None) -> None:
        """`context`: the row's own text, which may be `index` itself. `position`: of the token that is expected
        first."""
        self.name = name
        self.position = position
        self._index, self._context = index, context
        self._agreeing = 0
        self._left = position or 0  # the position at which the row's text has left this one

    @property
    def kind(self) -> Kind:
        """Source and class of the ending's length: 1, 2 to 3, 4 to 7, ... tokens."""
        return self.name, self._agreeing.bit_length()

    def index(self, most: int) -> int:
        """Index up to `most` tokens, and return their number."""
        return self._index.catch_up(most) if self._index.behind else 0

    def look_up(self) -> None:
        """Look up the row's ending, if its position is not known."""
        if self.position is None:
            self._find()

    @property
    def expected(self) -> int:
        """The token that would be offered first; only if there is a position."""
        assert self.position is not None
        return self._index.tokens[self.position]

    def advance(self, token: int, *, dropped: bool) -> None:
        """Follow the row by a token, from a position. `dropped`: positions of the row's own text have changed."""
        assert self.position is not None
        self._left = self.position + 1
        lost = dropped and self._index is self._context
        if not lost and self.expected == token:
            self._follow(self.position + 1, self._agreeing + 1)
        else:
            self.position = None

    def _follow(self, position: int, agreeing: int) -> None:
        self._agreeing = min(agreeing, MAX_AGREEMENT)
        self.position = position if position < len(self._index) else None

    def _find(self) -> None:
        """Look up the row's ending. Prefers the longest agreement, then the position where a text goes on."""
        self.position, self._agreeing = None, 0
        found = [*self._index.positions(self._context.tokens)]
        if found:
            self._follow(*max(found, key=lambda pair: (pair[1], -self._distance(pair[0]))))

    def _distance(self, position: int) -> int:
        """Return how far a position is from where the row's text left this one; in the row's own text, from its end."""
        if self._index is self._context:
            return len(self._index) - position
        return abs(position - self._left)

    def draft(self, most: int) -> tuple[int, ...]:
        """Return up to `most` tokens from the position on. A text that repeats itself up to its end goes on so."""
        assert self.position is not None
        tokens = self._index.tokens
        period = len(tokens) - self.position
        if self._index is self._context and period < most:
            return tuple(tokens[self.position + step % period] for step in range(most))
        return tuple(tokens[self.position : self.position + most])


def _prior(kind: Kind) -> float:
    """Return the rate for endings below 4 tokens, below 8, or longer, of `scripts/bench speculation`: lower than those
    of copied text, since they are learned without forwards too, and short endings occur by chance."""
    name, length_class = kind
    rates = (0.15, 0.5, 0.8) if name == COPY else (0.5, 0.8, 0.9)
    return rates[min(max(length_class - 2, 0), 2)]
