"""Reads the drafts of a row, with a matcher of their own.

A matcher's lexer keeps a state for each beginning of a word that it has tried, up to a limit, and copies of a matcher
share it. So drafts must not use the matcher of the answer: their states would end the answer sooner."""

from collections.abc import Iterator, Sequence

from worker.request import GrammarAhead
from worker.text.grammar.row.draft_time import DraftTime
from worker.text.grammar.row.reader import GrammarReader

_READ_AT_ONCE = 64  # tokens of an answer that are read at once before a draft


class DraftReader:
    """Reads the drafts of one row. Follows its answer."""

    def __init__(self, reader: GrammarReader, time_left: DraftTime) -> None:
        """`reader`: of a matcher that has nothing in common with the answer's. `time_left`: for its drafts."""
        self._reader = reader
        self._time = time_left
        self._unread = list[int]()  # the last tokens of the answer
        self._failed = not reader.reset()

    def reset(self) -> None:
        """Return to the state before the first sampled token."""
        self._unread.clear()
        self._failed = self._failed or not self._reader.reset()

    def append(self, token: int) -> None:
        """Append a token of the answer, which is read before the next draft."""
        self._unread.append(token)
        self._time.advance(self._reader.accepted + len(self._unread))

    def remove(self, count: int) -> None:
        """Take back the last `count` tokens of the answer."""
        kept = max(0, len(self._unread) - count)
        count -= len(self._unread) - kept
        del self._unread[kept:]
        if count and not self._failed:
            self._reader.rollback(count)

    @property
    def ready(self) -> bool:
        """True if there is time for drafts, and none has exceeded the limits of the grammar."""
        return self._time.left and not self._failed

    def ahead(self, draft: Sequence[int], mask: bytes | None) -> GrammarAhead:
        """Return what may come after a draft: see `GrammarState.ahead`. `mask`: after the answer."""
        with self._time:
            if not self._follow():
                return GrammarAhead()
            self._read(draft)
            if self._reader.in_thought:
                found = GrammarAhead()
            elif forced := self._reader.forced():
                found = GrammarAhead(forced)
            else:
                found = GrammarAhead(mask=self._reader.mask() if draft else mask)
            self._take_back(len(draft))
        return GrammarAhead() if self._failed else found

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the grammar allows: see `GrammarState.valid_prefix`."""
        with self._time:
            valid = self._reader.valid_prefix(tokens) if self._follow() else 0
            self._failed = self._failed or self._reader.error is not None
        return 0 if self._failed else valid

    def masks(self, draft: Sequence[int]) -> Iterator[bytes | None]:
        """Yield the masks after each token of a draft, which the grammar allows, until they take too much time, or the
        grammar is over."""
        walked = 0
        for token in draft:
            with self._time:
                walked += 1
                self._read([token])
                mask = self._reader.mask()
                self._failed = self._failed or self._reader.error is not None
            if self._failed:
                break
            yield mask
            if mask is None or not self._time.left:
                break
        self._take_back(walked)

    def _read(self, tokens: Sequence[int]) -> None:
        allowed = [self._reader.read(token) for token in tokens]
        self._failed = self._failed or not all(allowed)

    def _take_back(self, count: int) -> None:
        self._failed = self._failed or self._reader.error is not None
        if not self._failed:  # else nothing is read any more
            self._reader.rollback(count)

    def _follow(self) -> bool:
        """Read the answer. Returns False if that has failed, or is not finished yet."""
        reading, self._unread = self._unread[:_READ_AT_ONCE], self._unread[_READ_AT_ONCE:]
        self._read(reading)
        return not self._unread and not self._failed
