"""Draw the tokens of a forward that verifies drafts, and keep as many as plain decoding would have drawn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import mlx.core as mx

from worker.engine.sampling.processors import masked, processors_for
from worker.engine.sampling.sampler import SamplingKind, StepLogprobs, draw, draw_key
from worker.outcomes import Logprobs
from worker.request import GenerationRequest, GrammarState


class _SampledRow(Protocol):
    """The part of a row that its positions use."""

    request: GenerationRequest
    prompt_ids: mx.array | None
    kind: SamplingKind
    drawn: int
    answer: list[int]
    last_unfed: bool  # its next input is in the answer


class Position:
    """A place in a row's answer, with what the sampler and the logits processors need to draw its token."""

    def __init__(
        self, row: _SampledRow, request: GenerationRequest, index: int, before: Sequence[int], mask: bytes | None
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


def positions_after(row: _SampledRow, token: int, draft: Sequence[int]) -> Iterator[Position]:
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


def take_back(row: _SampledRow) -> None:
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


@dataclass(frozen=True, slots=True)
class _DrawnToken:
    """A token that a forward has drawn. `finite` is False if it was drawn from non-finite logits."""

    token: int
    finite: bool
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted tokens of a row's draft, and the token drawn after them."""

    tokens: tuple[_DrawnToken, ...]  # none after one that is not finite
    inputs: int  # of the tokens that were fed, those that its cache keeps
    clean: bool  # no input that it does not keep has produced a value that is not finite


def draw_positions(
    logits: mx.array, fed: Sequence[Sequence[int]], positions: Sequence[Sequence[Position]]
) -> "_DrawnPositions":
    """Draw a token at each position. `logits`: (rows, width, vocab); `fed`: the inputs of each row, of which the first
    have a position each. Lazy."""
    width, vocab = logits.shape[1:]
    indices = [row * width + at for row, asked_of_row in enumerate(positions) for at in range(len(asked_of_row))]
    flat = logits.reshape(-1, vocab)
    own = flat if len(indices) == len(flat) else flat[mx.array(indices)]
    asked = [position for row in positions for position in row]
    tokens = mx.array([token for inputs, each in zip(fed, positions, strict=True) for token in inputs[: len(each)]])
    for process in processors_for(asked, [False] * len(asked)):
        own = process(own, tokens)
    # The last, so that no bias allows what a grammar forbids.
    own = masked(own, {index: each.mask for index, each in enumerate(asked) if each.mask is not None})
    norm = mx.logsumexp(own, axis=-1, keepdims=True)
    logprobs = own - norm
    drawn = draw(logprobs, asked)
    return _DrawnPositions(
        drawn,
        mx.isfinite(norm[:, 0]),
        mx.isfinite(mx.logsumexp(logits, axis=-1)),
        _logprobs(asked, logprobs, drawn),
        [len(each) for each in positions],
    )


def _logprobs(asked: Sequence[Position], logprobs: mx.array, drawn: mx.array) -> tuple[StepLogprobs | None, list[int]]:
    """Return the log probabilities of the positions whose requests want them, and the indices of these."""
    wanting = [index for index, position in enumerate(asked) if position.request.top_logprobs is not None]
    if not wanting:
        return None, []
    at = mx.array(wanting)
    return StepLogprobs(logprobs[at], drawn[at], [asked[i].request.top_logprobs or 0 for i in wanting]), wanting


@dataclass(frozen=True, slots=True)
class _DrawnPositions:
    """The tokens drawn at all positions of a forward, row after row. Lazy."""

    tokens: mx.array  # (positions,)
    finite: mx.array  # (positions,), boolean: True if all logits were finite
    clean: mx.array  # (rows, width), boolean: True if no value of the input is known to be not finite
    logprobs: tuple[StepLogprobs | None, list[int]]
    counts: list[int]  # positions of each row

    def accept(self, drafts: Sequence[Sequence[int]]) -> list[Accepted]:
        """Return what is accepted of each draft. Blocks until all is computed."""
        step, wanting = self.logprobs
        mx.eval(self.tokens, self.finite, self.clean, step.arrays if step else [])
        found = dict(zip(wanting, step.rows, strict=True)) if step else {}
        tokens, finite = cast("list[int]", self.tokens.tolist()), cast("list[bool]", self.finite.tolist())
        clean = cast("list[list[bool]]", self.clean.tolist())
        accepted, start = list[Accepted](), 0
        for row, (draft, count) in enumerate(zip(drafts, self.counts, strict=True)):
            drawn = _drawn(range(start, start + count), tokens, finite, found)
            accepted.append(_accepted(drawn, draft, clean[row]))
            start += count
        return accepted


def _drawn(at: range, tokens: list[int], finite: list[bool], logprobs: Mapping[int, Logprobs]) -> list[_DrawnToken]:
    return [_DrawnToken(tokens[i], finite[i], logprobs.get(i)) for i in at]


def _accepted(drawn: Sequence[_DrawnToken], draft: Sequence[int], clean: Sequence[bool]) -> Accepted:
    accepted = 0
    while accepted + 1 < len(drawn) and drawn[accepted].finite and drawn[accepted].token == draft[accepted]:
        accepted += 1
    return Accepted(tuple(drawn[: accepted + 1]), accepted + 1, all(clean[accepted + 1 :]))
