"""The active rows, from admission to their last token, and what becomes of them after a failure."""

from collections.abc import Callable, Iterator

from worker.engine.admission_controller import WaitingRequest
from worker.engine.batch.decode_batch import PreemptedRow
from worker.engine.batch.groups import Groups
from worker.engine.batch.row import Row
from worker.engine.isolation import isolate
from worker.engine.prefill.queue import PrefillQueue
from worker.outcomes import Outcome, RowFailed
from worker.request import GenerationRequest

_MAX_FAILURES = 10  # failures without a decoded token between them, after which the engine gives up


class EngineBroken(Exception):
    """`_MAX_FAILURES` failures without a decoded token between them: the rows are not the cause."""


class ActiveRows:
    """Owner of the active rows, in the order in which their requests have arrived. Each is in prefill or decodes, or
    has lost its cache by a failure and is recomputed from its tokens, so no delivered token is lost. For the engine's
    thread."""

    def __init__(self, prefills: PrefillQueue, running: Groups, on_release: Callable[[], None]) -> None:
        """`prefills` and `running` hold the rows' caches. `on_release` is called when rows may have freed memory."""
        self._prefills = prefills
        self._running = running
        self._on_release = on_release
        self._rows: dict[str, Row] = {}
        self._failures = 0  # without a decoded token between them
        self._swept = True  # no row was removed since the last sweep

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, id: str) -> bool:
        return id in self._rows

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows, the oldest first."""
        return iter(self._rows.values())

    def begin(
        self, request: GenerationRequest, reserved: int, age: int, *, recomputed: bool = False
    ) -> Iterator[Outcome]:
        """Start the prefill of a request. If that fails, the request fails, and no other is affected. For `reserved`
        and `age` see `Row`."""
        with isolate(f"{request.id}: starting its prefill") as attempt:
            row = Row.of(request, reserved=reserved, recomputed=recomputed)
            row.age = age
            self._prefills.add(row)
            self._insert(row)
        if attempt.failed:
            yield self.fail(request.id)

    def restore(self, preempted: PreemptedRow, reserved: int) -> None:
        """Let a preempted row continue to decode. `reserved`: see `Row`. Blocks."""
        preempted.row.reserve(reserved)
        self._insert(preempted.row)
        self._running.restore(preempted)

    def _insert(self, row: Row) -> None:
        """Add a row in its place by age."""
        self._rows = dict(sorted((self._rows | {row.id: row}).items(), key=lambda item: item[1].age))

    def must_grow(self, ahead: int) -> bool:
        """Return True if a row may outgrow its reservation with this number of tokens."""
        return any(row.must_grow(ahead) for row in self._rows.values())

    def reserve(self, id: str, tokens: int) -> None:
        """Record that more memory is reserved for a row: see `Row.reserve`."""
        self._rows[id].reserve(tokens)

    def cut(self, id: str, tokens: int) -> None:
        """Let the answer of a row end after this number of tokens."""
        self._rows[id].cut(tokens)

    def move(self, id: str) -> None:
        """Move a decoding row to a group that has room for what is reserved for it. Blocks."""
        if id in self._rows:
            self._running.move(self._rows[id])

    def preempt(self, id: str) -> WaitingRequest:
        """Remove a row, and return its request, with its cache if it was decoding. What the prefill has computed is
        written to disk if that pays. Blocks."""
        row = self._rows[id]
        decodes = any(each is row for _, each in self._running)  # else it is in prefill, or has lost its cache
        saved_row = self._running.preempt(row) if decodes else None
        self._prefills.spill(id)
        self.remove(id)
        return WaitingRequest(row.resumable_request(), saved_row, preempted=True, age=row.age)

    def remove(self, id: str) -> Row | None:
        """Remove and return a row; None for an unknown id. If it decodes, `sweep` frees its memory."""
        self._prefills.remove(id)
        self._swept = False
        if row := self._rows.pop(id, None):
            self._running.verifications.forget(row)
        return row

    def end(self, id: str) -> None:
        """Remove a row that has drawn its last token. `sweep` frees its memory."""
        self.remove(id)
        self._on_release()

    def sweep(self) -> None:
        """Free the memory of decoding rows that have ended or were removed. Blocks."""
        if not self._swept:
            self._swept = True
            self._running.remove({row for _, row in self._running if row.id not in self._rows})

    def fail(self, id: str) -> RowFailed:
        """Remove a row that has caused a failure."""
        self.end(id)
        self._failures += 1
        return RowFailed(id)

    def lose_decoding(self) -> None:
        """Give up the caches of all decoding rows, after a failure that any of them may have caused."""
        self._failures += not len(self._running)  # otherwise `recover` counts it
        self._running.clear()
        self._on_release()

    def recover(self) -> Iterator[Outcome]:
        """Recompute the rows that have lost their caches. Each decodes in a group of its own until it has produced a
        token, so a row that causes the failure fails alone."""
        lost = {*self._running.pop_lost()}
        if not lost:
            return
        rows = [row for row in self if row in lost]
        self._failures += bool(rows)
        for row in rows:
            yield from self.begin(row.resumable_request(), row.reserved, row.age, recomputed=True)

    def reset_failures(self) -> None:
        """Record that a token was decoded."""
        self._failures = 0

    def check(self) -> None:
        """Raise `EngineBroken` after `_MAX_FAILURES` failures without a decoded token between them."""
        if self._failures >= _MAX_FAILURES:
            raise EngineBroken(f"{self._failures} failures without a decoded token between them")
