"""Rows that decode together: one forward for all of them, of one token each or of several."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.engine.batch.row import BatchSampling, PendingTokens, Row, StepToken, forward
from worker.engine.cache import slots
from worker.engine.cache.layers import layers
from worker.engine.cache.recurrent import Recurrence
from worker.engine.cache.slots import verification
from worker.engine.speculation.mtp import FedTokens, Network, PromptEntries, Trunk
from worker.engine.speculation.verify import Accepted, draw_positions, positions_after, take_back

# At most `max_draft` tokens of which none ends an answer; None for a row whose next input ends its answer.
Draft = Sequence[int] | None


@dataclass(frozen=True, slots=True)
class _VerifiedStep:
    """A forward that has verified drafts."""

    tokens: list[StepToken]  # that rows have drawn and that are not delivered yet, each row's in order
    accepted: list[int]  # of each row: tokens of its draft


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """A row that can decode. `cache`: mlx-lm caches of this row alone, without its next input; they must not be used
    once it has joined a batch. `pending`: its next input. `position`: position of that input, if it differs from the
    length of the cache. `entries`: of an MTP head, if the model has one. `cached`: tokens that its prefill has found in
    the prefix cache."""

    row: Row
    cache: list[Any]
    pending: PendingTokens
    position: int | None = None
    entries: PromptEntries | None = None
    cached: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of its prompt without the last one, which its prefill has computed or loaded."""
        return self.row.length - 1


@dataclass(frozen=True, slots=True)
class PreemptedRow:
    """A row outside its batch, with everything that it needs to continue."""

    row: Row
    snapshot: slots.RowCache
    pending: PendingTokens


class DecodeBatch:
    """A batch of rows and its cache, for the engine's thread.

    While the device computes the next tokens, the host handles the last ones: `launch` feeds each row its token and
    draws the next one, lazily; `collect` returns the tokens that were fed. A row that has just joined is fed the last
    token of its prompt, which `collect` omits. If the device has other work before the next step, `collect_drawn`
    returns tokens before they are fed. Rows join and leave only between `collect` and `launch`."""

    def __init__(self, network: Network, max_draft: int = 0) -> None:
        """Create a batch without rows. `network` is shared with other batches. `max_draft`: see `verify`."""
        self._network = network
        self._max_draft = max_draft
        self.rows: list[Row] = []
        self._cache: list[Any] = []
        self._fed: PendingTokens | None = None
        self._next: PendingTokens | None = None
        self._sampling: BatchSampling | None = None  # of the rows; None after these have changed
        self.fed: FedTokens | None = None  # by the last forward, if the network records its hidden states

    @property
    def lengths(self) -> list[int]:
        """Length of each row in tokens."""
        return [row.length for row in self.rows]

    @property
    def started(self) -> bool:
        """True if the answer of a row has begun."""
        return any(row.started for row in self.rows)

    @property
    def starting(self) -> bool:
        """True if the running step draws the first token of an answer."""
        return not all(row.answer for row in self.rows)

    @property
    def ending(self) -> bool:
        """True if each row has drawn the last token of its answer, which is not delivered yet."""
        return all(row.ending for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the cache, spare room included."""
        return slots.bytes_of(self._cache)

    def cache_of(self, row: Row) -> tuple[list[Any], int]:
        """Return the batch's cache and the row's index in it."""
        return self._cache, self.rows.index(row)

    def join_copy_bytes(self, tokens: int) -> int:
        """Return the bytes of buffers, other than its own, that are copied when a row of `tokens` tokens joins."""
        return slots.growth(self._cache, tokens)

    @property
    def step_copy_bytes(self) -> int:
        """Bytes of buffers that are copied by the next `launch`, since they are full."""
        return slots.step_growth(self._cache)

    def tighten(self) -> None:
        """Free memory that buffers still occupy after rows have left. Blocks until the running step has ended."""
        slots.tighten(self._cache)

    def launch(self) -> None:
        """Feed each row its next token, and start computing the one after it. Does not wait for the device. There must
        be rows."""
        assert self._next is not None, "the batch has no rows"
        if self._sampling is None:
            self._sampling = BatchSampling([*self.rows], [not row.last_unfed for row in self.rows])
        self._fed = self._next
        self._next = forward(self._network, self._cache, self.rows, self._fed.tokens, self._sampling)
        self.fed = self._recorded([1] * len(self.rows))

    def read_inputs(self) -> list[StepToken]:
        """Return the next input of each row. There must be rows. Blocks until the launched step has ended."""
        assert self._next is not None, "the batch has no rows"
        return self._next.read(self.rows)

    def verify(
        self, inputs: Sequence[StepToken], drafts: Sequence[Draft], recurrence: Recurrence
    ) -> _VerifiedStep | None:
        """Feed each row its next input and its draft. Draws what `launch` would draw, whatever the drafts. Blocks until
        all is computed. None, and the rows are as before, if a token was drawn from non-finite logits: a draft may be
        the reason, and `launch` decides. `inputs`: of `read_inputs`. `drafts`: of each row."""
        fed = [(each.token, *(draft or ())) for each, draft in zip(inputs, drafts, strict=True)]
        width = max(map(len, fed))
        padded = [[*each, *[each[-1]] * (width - len(each))] for each in fed]
        self._sampling = None
        with verification(self._cache, width) as verifying:
            with recurrence.recording(self._cache):
                logits = self._network(mx.array(padded), cache=self._cache)
            mx.async_eval(logits)
            asked = [
                [*positions_after(each.row, each.token, draft or ())]
                for each, draft in zip(inputs, drafts, strict=True)
            ]
            accepted = draw_positions(logits, fed, asked).accept([draft or () for draft in drafts])
            clear = [index for index, each in enumerate(accepted) if not (each.clean and each.tokens[-1].finite)]
            if not all(each.tokens[-1].finite for each in accepted):
                verifying.discard(clear)
                for each in inputs:
                    take_back(each.row)
                return None
            counts = [each.inputs for each in accepted]
            verifying.commit(counts, clear)
        self.fed = self._recorded(counts, tuple(tuple(drawn.token for drawn in each.tokens) for each in accepted))
        mx.async_eval([layer.state for layer in layers(self._cache)])
        self._next = PendingTokens.known([each.tokens[-1].token for each in accepted])
        tokens = [token for each in zip(inputs, drafts, accepted, strict=True) for token in _delivered(*each)]
        return _VerifiedStep(tokens, [count - 1 for count in counts])

    def _recorded(self, counts: Sequence[int], after: tuple[tuple[int, ...], ...] | None = None) -> FedTokens | None:
        """Return the tokens of the last forward that the rows keep, with their hidden states, if the network records
        these. `counts`: of each row. `after`: see `FedTokens`."""
        if not isinstance(self._network, Trunk):
            return None
        positioned = next(layer for layer in layers(self._cache) if layer.slot_rows is not None)
        positions = tuple(positioned.position(index) - count for index, count in enumerate(counts))
        return FedTokens(tuple(row.id for row in self.rows), self._network.take_hidden(), positions, after)

    def wait(self) -> None:
        """Block until the launched step has been computed, and rows that were moved since are in their slots, which
        frees the copies of them. There must be rows."""
        assert self._next is not None, "the batch has no rows"
        mx.eval(self._next.tokens, self._next.norms)
        slots.materialize(self._cache)

    def collect(self) -> list[StepToken]:
        """Return the tokens that the last `launch` fed, without those that are known already. Blocks until they are
        computed, which is the end of the step before that one; the launched step itself is not waited for."""
        fed, self._fed = self._fed, None
        assert fed is not None, "nothing was launched"
        step_tokens = self._read(fed)
        self._accept(step_tokens)
        for row in self.rows:
            row.mark_fed()
        return step_tokens

    def _accept(self, step_tokens: Sequence[StepToken]) -> None:
        """Let free grammars accept the tokens, and draw the next one again for rows that are held from now on."""
        if self._sampling and self._next and (drawn := self._sampling.accept(step_tokens, self._next)):
            self._next, self._sampling = drawn, None

    def collect_drawn(self) -> list[StepToken]:
        """Return the tokens that the rows have drawn before they are fed, without those that are known already. Blocks
        until they are computed, which is the end of the launched step. There must be rows."""
        assert self._next is not None, "the batch has no rows"
        step_tokens = self._read(self._next)
        for step_token in step_tokens:
            step_token.row.mark_unfed()
            if grammar := step_token.row.request.grammar:  # processors created from now on count known tokens only
                grammar.accept(step_token.token)
                self._sampling = None
        return step_tokens

    def _read(self, pending: PendingTokens) -> list[StepToken]:
        return [each for each in pending.read(self.rows) if not each.row.last_unfed]

    def add(self, rows: Sequence[ComputedRow]) -> None:
        """Append rows. Blocks. If the caches cannot be joined, the batch stays as it was."""
        joining = [slots.RowCache(each.cache, each.position, each.row.end) for each in rows]
        pending = [each.pending for each in rows]
        if self._next is None:
            cache = slots.empty_batch_of(rows[0].cache, self._max_draft)
            slots.join_all(cache, joining)
            self._cache = cache
        else:
            slots.join_all(self._cache, joining)
            pending = [self._next, *pending]
        self._next = PendingTokens.together(pending)
        self.rows += [each.row for each in rows]
        self._sampling = None

    def remove(self, leaving: Collection[Row]) -> None:
        """Remove rows. The others may change their order. Blocks until those that change their slot are copied."""
        order = slots.compact_order(len(self.rows), {i for i, row in enumerate(self.rows) if row in leaving})
        self.rows = [self.rows[index] for index in order]
        self._sampling = None
        if not order:
            self._cache, self._next = [], None
            self.fed = None
            return
        slots.select_rows(self._cache, order)
        assert self._next is not None
        remaining = mx.array(order)
        logprobs = {row: each for row, each in self._next.logprobs.items() if row not in leaving}
        self._next = PendingTokens(self._next.tokens[remaining], self._next.norms[remaining], logprobs)
        self._next.compute()

    def preempt(self, row: Row) -> PreemptedRow:
        """Remove a row of the batch, and return it with a copy of its cache. Blocks."""
        assert self._next is not None
        at = self.rows.index(row)
        own = slice(at, at + 1)
        logprobs = {row: self._next.logprobs[row]} if row in self._next.logprobs else {}
        pending = PendingTokens(mx.contiguous(self._next.tokens[own]), mx.contiguous(self._next.norms[own]), logprobs)
        mx.eval(pending.tokens, pending.norms)
        snapshot = slots.snapshot(self._cache, at)
        self.remove([row])
        return PreemptedRow(row, snapshot, pending)

    def restore(self, preempted: PreemptedRow) -> None:
        """Append a preempted row, as `add` does."""
        cache, position = slots.restore(preempted.snapshot), preempted.snapshot.position
        self.add([ComputedRow(preempted.row, cache, preempted.pending, position)])


def _delivered(row_input: StepToken, draft: Draft, accepted: Accepted) -> Iterator[StepToken]:
    """Yield the tokens of a row to deliver, and record that it has drawn them."""
    row = row_input.row
    if not row.last_unfed:
        yield row_input
    if draft is None:
        return
    row.mark_verified(len(accepted.tokens))
    for number, drawn in enumerate(accepted.tokens, start=1):
        if row.request.grammar and drawn.finite:
            row.request.grammar.accept(drawn.token)
        yield StepToken(row, drawn.token, drawn.finite, drawn.logprobs, accepted=number < len(accepted.tokens))
