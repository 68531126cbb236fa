"""The tokens that one forward draws for a row: one after each of its inputs, as plain decoding would draw them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from worker.engine.sampling.sampler import Kind, draw_key
from worker.request import GenerationRequest, GrammarState


class SampledRow(Protocol):
    """The part of a row that its positions use."""

    request: GenerationRequest
    prompt_ids: mx.array | None
    kind: Kind
    drawn: int
    answer: list[int]
    last_unfed: bool  # its next input is in the answer


class Position:
    """A place in a row's answer, with what the sampler and the logits processors need to draw its token."""

    def __init__(
        self, row: SampledRow, request: GenerationRequest, index: int, before: Sequence[int], mask: bytes | None
    ) -> None:
        """`request`: the row's, without its grammar. `index`: number of the token among those that the forward draws
        for the row. `before`: tokens between the answer of the row and this one. `mask`: the tokens that the grammar
        allows here, as in `GrammarState.bitmask`; None: any."""
        self.request, self.prompt_ids = request, row.prompt_ids
        self.mask = mask
        self.kind = row.kind
        self._row, self._before = row, before
        self._number = row.drawn + index

    @property
    def answer(self) -> list[int]:
        """The answer up to this position; drafted tokens are part of it."""
        return [*self._row.answer, *self._before]

    def next_key(self) -> tuple[int, int]:
        """Return the random key that plain decoding would use here."""
        key = draw_key(self._row.request.sampling.seed, self._number)
        return key >> 32, key & 0xFFFFFFFF  # the layout of mx.random.key


def positions_after(row: SampledRow, token: int, draft: Sequence[int]) -> Iterator[Position]:
    """Yield a position after the row's next input and after each token of the draft, as far as the row's grammar allows
    the draft. The grammar accepts the input, unless it has before."""
    grammar, masks = row.request.grammar, list[bytes | None]([None] * (len(draft) + 1))
    undelivered = [] if row.last_unfed else [token]
    request = row.request
    if grammar:
        for each in undelivered:
            grammar.accept(each)
        masks, request = grammar.masks_along(draft), replace(row.request, grammar=None)
    for index, mask in enumerate(masks):
        yield Position(row, request, index, [*undelivered, *draft[:index]], mask)


def take_back(row: SampledRow) -> None:
    """Let the row's grammar take back the input that it has accepted for `positions_after`."""
    if row.request.grammar and not row.last_unfed:
        row.request.grammar.rollback(1)


def allowed(grammar: GrammarState | None, undelivered: Sequence[int], draft: Sequence[int]) -> int:
    """Return how many of the draft's first tokens a grammar allows after `undelivered`, which it has not accepted yet.
    Leaves the grammar as it was."""
    if grammar is None:
        return len(draft)
    for token in undelivered:
        grammar.accept(token)
    if grammar.error:  # the plain step that follows meets the same error
        return 0
    count = grammar.valid_prefix(draft)
    grammar.rollback(len(undelivered))
    return count
