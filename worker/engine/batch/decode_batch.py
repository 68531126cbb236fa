"""Rows that decode together: one forward for all of them, a token each."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.batch.row import Row
from worker.engine.cache import slots
from worker.engine.sampling.logprobs import logprobs_of
from worker.engine.sampling.sampler import draw
from worker.schedule.outcomes import Logprobs


@dataclass(slots=True)
class PendingTokens:
    """The tokens that rows are fed next, one each; lazy."""

    tokens: mx.array  # (rows,)
    finite: mx.array  # (rows,): true if all logits of the row were finite
    logprobs: dict[Row, mx.array]  # (1, vocab), of the rows that want logprobs

    def compute(self) -> None:
        """Does not block. Arrays that are first computed as a part of the next step can be read only at its end, and
        the tokens would be told a step late."""
        mx.async_eval(self.tokens, self.finite, list(self.logprobs.values()))


@dataclass(frozen=True, slots=True)
class StepToken:
    """A row's next token. `finite` is False if it was drawn from non-finite logits."""

    row: Row
    token: int
    finite: bool
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class PreemptedRow:
    """A row outside its batch, with everything that it needs to continue."""

    row: Row
    snapshot: slots.Snapshot
    pending: PendingTokens


class DecodeBatch:
    """While the device computes the next tokens, the host tells of the last: `launch` feeds each row's token and
    draws the next, lazily; `collect` waits for those that were fed.

    A row that has just come is fed the last token of its prompt, which is no news. Rows come and go between
    `collect` and `launch` only.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self.rows: list[Row] = []
        self._cache: list[Any] = []
        self._fed: PendingTokens | None = None
        self._next: PendingTokens | None = None

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    @property
    def nbytes(self) -> int:
        return slots.bytes_of(self._cache)

    def cache_of(self, row: Row) -> tuple[list[Any], int]:
        """Return the batch's cache and the row's index in it."""
        return self._cache, self.rows.index(row)

    def join_copy_bytes(self, tokens: int) -> int:
        """Bytes that are copied when a row of that length joins, beside its own."""
        return slots.growth(self._cache, tokens)

    def tighten(self) -> None:
        """Give back what its buffers have beyond their room to spare. Waits for the step under way."""
        slots.tighten(self._cache)

    def launch(self) -> None:
        assert self._next is not None, "there is nobody"
        self._fed = self._next
        self._next = forward(self._network, self._cache, self.rows, self._fed.tokens)

    def wait(self) -> None:
        assert self._next is not None, "there is nobody"
        mx.eval(self._next.tokens, self._next.finite)

    def collect(self) -> list[StepToken]:
        fed, self._fed = self._fed, None
        assert fed is not None, "nothing was launched"
        tokens: list[int] = fed.tokens.tolist()  # type: ignore[assignment]
        sound: list[bool] = fed.finite.tolist()  # type: ignore[assignment]
        news = [i for i, row in enumerate(self.rows) if not row.awaiting_first_step]
        logprobs = _logprobs({self.rows[i]: tokens[i] for i in news if self.rows[i].wants_logprobs}, fed.logprobs)
        for row in self.rows:
            row.awaiting_first_step = False
        return [StepToken(self.rows[i], tokens[i], sound[i], logprobs.get(self.rows[i])) for i in news]

    def add(self, row: Row, cache: list[Any], drawn: PendingTokens, position: int | None = None) -> None:
        """`cache`: of this row alone, without the token that it is fed next; it is spent."""
        if self._next is None:
            self._cache, self._next = slots.batch_of(cache, position, row.end), drawn
        else:
            slots.join(self._cache, cache, position, row.end)
            self._next = PendingTokens(
                mx.concatenate([self._next.tokens, drawn.tokens]),
                mx.concatenate([self._next.finite, drawn.finite]),
                self._next.logprobs | drawn.logprobs,
            )
            self._next.compute()
        self.rows.append(row)

    def remove(self, gone: Collection[Row]) -> None:
        places = slots.compact_order(len(self.rows), {i for i, row in enumerate(self.rows) if row in gone})
        self.rows = [self.rows[place] for place in places]
        if not places:
            self._cache, self._next = [], None
            return
        slots.select_rows(self._cache, places)
        assert self._next is not None
        kept = mx.array(places)
        logprobs = {row: theirs for row, theirs in self._next.logprobs.items() if row not in gone}
        self._next = PendingTokens(self._next.tokens[kept], self._next.finite[kept], logprobs)
        self._next.compute()

    def preempt(self, row: Row) -> PreemptedRow:
        assert self._next is not None
        at = self.rows.index(row)
        place = slice(at, at + 1)
        logprobs = {row: mx.contiguous(self._next.logprobs[row])} if row in self._next.logprobs else {}
        drawn = PendingTokens(
            mx.contiguous(self._next.tokens[place]), mx.contiguous(self._next.finite[place]), logprobs
        )
        mx.eval(drawn.tokens, drawn.finite, list(logprobs.values()))
        kept = slots.snapshot(self._cache, at)
        self.remove([row])
        return PreemptedRow(row, kept, drawn)

    def restore(self, parked: PreemptedRow) -> None:
        self.add(parked.row, slots.restore(parked.snapshot), parked.pending, parked.snapshot.position)


def forward(network: nn.Module, cache: list[Any], rows: list[Row], tokens: mx.array) -> PendingTokens:
    """Feeds each row its token (rows,) and draws the next one. Under way when this returns."""
    logits = network(tokens[:, None], cache=cache)[:, -1, :]
    if any(row.processors for row in rows):
        each = enumerate(rows)
        logits = mx.concatenate([row.processed(logits[i : i + 1], tokens[i : i + 1]) for i, row in each])
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    logprobs = logits - norm
    asked = {row: logprobs[i : i + 1] for i, row in enumerate(rows) if row.wants_logprobs}
    drawn = PendingTokens(draw(logprobs, rows), mx.isfinite(norm[:, 0]), asked)
    drawn.compute()
    return drawn


def _logprobs(tokens: dict[Row, int], found: dict[Row, mx.array]) -> dict[Row, Logprobs]:
    if not tokens:
        return {}
    alternatives = [row.request.top_logprobs or 0 for row in tokens]
    # Not on the stream of the generation, where the next step is under way: this would wait for its end.
    with mx.stream(mx.default_device()):
        told = logprobs_of(mx.concatenate([found[row] for row in tokens]), list(tokens.values()), alternatives)
    return dict(zip(tokens, told, strict=True))
