"""One request in the engine, from admission to its last token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NamedTuple, cast

import mlx.core as mx

from worker.engine.sampling.processors import masked, needs_prompt, processors_for
from worker.engine.sampling.sampler import Sampler, SamplingKind, StepLogprobs, draw, draw_key, sampling_kind
from worker.engine.speculation.mtp import Network
from worker.engine.speculation.verify import Position
from worker.outcomes import Logprobs
from worker.request import GenerationRequest, GrammarState, Range


@dataclass(slots=True, eq=False)
class Row:
    """Mutable state of one request while it prefills and decodes. Its KV cache lives elsewhere: in its prefill, then in
    a batch."""

    request: GenerationRequest
    prompt_ids: mx.array | None  # the distinct tokens of the prompt, if a logits processor needs them
    kind: SamplingKind
    drawn: int  # number of draws: tokens of the answer from all attempts, the pending one included
    answer: list[int]  # tokens delivered so far, by all attempts
    reserved: int  # tokens of the answer that memory is reserved for
    num_dropped: int = 0  # tokens of the prompt that are never computed
    recomputed: bool = False  # after a failure that lost its cache
    age: int = 0  # number of requests that have arrived before it
    last_unfed: bool = True  # its next input is its last known token, which is not in its cache yet

    @classmethod
    def of(cls, request: GenerationRequest, *, reserved: int | None = None, recomputed: bool = False) -> "Row":
        """Return a new row for a request, also for one that resumes after `resume_tokens`. Its grammar starts anew and
        accepts these. `reserved`: tokens of the answer that memory is reserved for; None: `max_tokens`. `recomputed`:
        an earlier row of this request has lost its cache by a failure."""
        if request.grammar:
            _replay(request.grammar, request.resume_tokens)
        ids = mx.array(sorted(set(request.prompt))) if needs_prompt(request.sampling) else None
        delivered = list(request.resume_tokens)
        kind, num_dropped = sampling_kind(request.sampling), request.num_dropped
        reserved = request.max_tokens if reserved is None else reserved
        return cls(request, ids, kind, len(delivered), delivered, reserved, num_dropped, recomputed)

    @property
    def id(self) -> str:
        """Id of the request."""
        return self.request.id

    @property
    def started(self) -> bool:
        """True if its answer has begun, or its next token is drawn from now on."""
        return bool(self.answer) or not self.last_unfed

    @property
    def ending(self) -> bool:
        """True if it has drawn the last token of its answer, which is not delivered yet."""
        return not self.last_unfed and len(self.answer) + 1 >= self.request.max_tokens

    @property
    def runs_alone(self) -> bool:
        """True if it decodes alone, since it may be the cause of a failure: its cache was lost, and it has produced no
        token since."""
        return self.recomputed and len(self.answer) == len(self.request.resume_tokens)

    @property
    def length(self) -> int:
        """Number of tokens in the cache of a decoding row after the running step: prompt tokens that are not dropped,
        and the answer so far. If `last_unfed`, the cache has one less."""
        return len(self.request.prompt) - self.num_dropped + len(self.answer)

    @property
    def end(self) -> int:
        """`length` at the end of the answer, if that is as long as memory is reserved for: that may become longer."""
        return len(self.request.prompt) - self.num_dropped + self.reserved

    def must_grow(self, ahead: int) -> bool:
        """Return True if the answer may outgrow its reservation with this number of tokens."""
        return self.reserved < min(self.request.max_tokens, len(self.answer) + ahead)

    def reserve(self, tokens: int) -> None:
        """Record the tokens of the answer that memory is reserved for."""
        self.reserved = tokens

    def cut(self, tokens: int) -> None:
        """Let the answer end after this number of tokens."""
        self.reserved, self.request = tokens, replace(self.request, max_tokens=tokens)

    def deliver(self, token: int) -> None:
        """Append a token to the answer."""
        self.answer.append(token)

    def mark_unfed(self) -> None:
        """Record that the token that it has drawn is known before it is fed."""
        self.last_unfed = True

    def mark_fed(self) -> None:
        """Record that its last known token was fed: its next input is a token that it has drawn."""
        self.last_unfed = False

    def mark_verified(self, tokens: int) -> None:
        """Record that it has drawn several tokens in one forward. All are known, and the last is its next input."""
        self.drawn += tokens
        self.last_unfed = True

    def drop_tokens(self, kept: tuple[Range, ...]) -> None:
        """Drop all tokens of the prompt outside the ranges, now and if the row is recomputed later. Called before its
        prefill."""
        self.request = replace(self.request, kept_ranges=kept)
        self.num_dropped = self.request.num_dropped

    def keep_all_tokens(self) -> None:
        """Keep all tokens of the prompt, and never score it again, so that admission need not reserve the draft's
        cache."""
        self.request, self.num_dropped = replace(self.request, kept_ranges=None, specprefill=None), 0

    def cache_key(self, *ending: int) -> tuple[int, ...]:
        """Return the cache key of everything in its cache between two steps: prompt, answer, and `ending`, tokens that
        it has drawn but that are not part of the answer; without the last of these if it was not fed."""
        tokens = *self.request.prompt, *self.answer, *ending
        return self.request.cache_key(tokens[:-1] if self.last_unfed else tokens)

    @property
    def wants_logprobs(self) -> bool:
        """True if the request wants logprobs."""
        return self.request.top_logprobs is not None

    def resumable_request(self) -> GenerationRequest:
        """Return a request that continues the row from its tokens, without its cache."""
        return replace(self.request, resume_tokens=tuple(self.answer))

    def next_key(self) -> tuple[int, int]:
        """Return the random key of the next draw, and advance. Draw k is keyed by (seed, k), so a resumed row continues
        with the same draws."""
        key = draw_key(self.request.sampling.seed, self.drawn)
        self.drawn += 1
        return key >> 32, key & 0xFFFFFFFF  # the layout of mx.random.key


def _replay(grammar: GrammarState, tokens: Sequence[int]) -> None:
    grammar.reset()  # the row may be recomputed after a failure or a preemption
    for token in tokens:
        grammar.accept(token)


class _RowLogprobs(NamedTuple):
    """Log probabilities of a row's next input, among those of the forward that has drawn it."""

    step: StepLogprobs
    number: int

    def read(self) -> Logprobs:
        """Return them. Blocks until they are computed."""
        return self.step.rows[self.number]


class StepToken(NamedTuple):
    """A token that a row has drawn. `finite` is False if it was drawn from non-finite logits. `accepted`: it was in the
    row's draft."""

    row: Row
    token: int
    finite: bool
    logprobs: Logprobs | None
    accepted: bool = False


@dataclass(slots=True)
class PendingTokens:
    """The next input of each row: a token that was drawn, or the last one of a prompt. Lazy."""

    tokens: mx.array  # (rows,)
    norms: mx.array  # (rows,): logarithm of the sum of the exponentials of the logits; finite only if they are
    logprobs: dict[Row, _RowLogprobs]  # of the rows that want logprobs and have drawn their token

    @classmethod
    def known(cls, tokens: Sequence[int]) -> "PendingTokens":
        """Return inputs that the host knows."""
        return cls(mx.array([*tokens]), mx.array([0.0] * len(tokens)), {})

    @classmethod
    def together(cls, pending: Sequence["PendingTokens"]) -> "PendingTokens":
        """Return the next inputs of all these rows. If there are several, the device has begun to compute them."""
        if len(pending) == 1:
            return pending[0]
        logprobs = {row: each for part in pending for row, each in part.logprobs.items()}
        tokens, norms = [each.tokens for each in pending], [each.norms for each in pending]
        joined = cls(mx.concatenate(tokens), mx.concatenate(norms), logprobs)
        joined.compute()
        return joined

    def compute(self) -> None:
        """Start computing the arrays, without blocking. If they were first computed as a part of the next step, they
        could be read only at its end, a step late."""
        steps = {each.step for each in self.logprobs.values()}
        mx.async_eval(self.tokens, self.norms, [step.arrays for step in steps])

    def read(self, rows: Sequence[Row]) -> list[StepToken]:
        """Return the token of each row. Blocks until they are computed."""
        tokens, norms = cast("list[int]", self.tokens.tolist()), cast("list[float]", self.norms.tolist())
        logprobs = self.logprobs
        return [
            StepToken(row, token, isfinite(norm), logprobs[row].read() if row in logprobs else None)
            for row, token, norm in zip(rows, tokens, norms, strict=True)
        ]


class BatchSampling:
    """Draws the next tokens of the same rows in every step. What these have in common is prepared once."""

    def __init__(self, rows: Sequence[Row], fed_drawn: Sequence[bool]) -> None:
        """`fed_drawn`: see `processors_for`."""
        self._processors = processors_for(rows, fed_drawn)
        self._draw = Sampler(rows)
        self._wanting = [index for index, row in enumerate(rows) if row.wants_logprobs]
        self._rows = rows
        grammars = {row: row.request.grammar for row in rows if row.request.grammar}
        self._free = {row: grammar for row, grammar in grammars.items() if grammar.is_free}
        self._held = [grammar for row, grammar in grammars.items() if row not in self._free]
        self._logits: mx.array | None = None  # of the last draw, if a row is free

    def draw(self, logits: mx.array, fed: mx.array) -> PendingTokens:
        """Draw a token from the logits (rows, vocab) after the tokens that were fed (rows,). Lazy, but blocks for rows
        with a grammar, which needs their last token. Advances the rows' random keys and the processors."""
        for process in self._processors:
            logits = process(logits, fed)
        self._logits = logits if self._free else None
        norm = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = logits - norm
        drawn = self._draw(logprobs)
        return PendingTokens(drawn, norm.squeeze(1), self._logprobs(logprobs, drawn) if self._wanting else {})

    def accept(self, fed: Sequence[StepToken], pending: PendingTokens) -> PendingTokens | None:
        """Let free grammars accept the tokens that were fed for the last draw. Returns None if the rows go on as they
        are; else the draw, in which the rows that are held from now on have drawn again. Lazy."""
        free, begun = self._free, list[Row]()
        for each in fed:
            if grammar := free.get(each.row):
                grammar.accept(each.token)
                if not grammar.is_free:
                    begun.append(each.row)
        logits, self._logits = self._logits, None
        masks = {self._rows.index(row): mask for row in begun if (mask := free[row].bitmask()) is not None}
        if masks and logits is not None:
            return self._again(logits, pending, masks)
        return pending if any(grammar.is_free for grammar in self._held) else None

    def _again(self, logits: mx.array, pending: PendingTokens, masks: Mapping[int, bytes]) -> PendingTokens:
        """Draw the tokens of these rows again, by their masks and with the same random keys."""
        at = mx.array([*masks])
        own = masked(logits[at], dict(enumerate(masks.values())))
        norm = mx.logsumexp(own, axis=-1, keepdims=True)
        rows = [self._rows[index] for index in masks]
        tokens, norms = mx.array(pending.tokens), mx.array(pending.norms)
        tokens[at] = drawn = draw(own - norm, [Position(row, row.request, -1, (), None) for row in rows])
        norms[at] = norm.squeeze(1)
        logprobs = dict(pending.logprobs)
        if wanting := [place for place, row in enumerate(rows) if row.wants_logprobs]:
            step = StepLogprobs(
                (own - norm)[mx.array(wanting)],
                drawn[mx.array(wanting)],
                [rows[place].request.top_logprobs or 0 for place in wanting],
            )
            logprobs |= {rows[place]: _RowLogprobs(step, number) for number, place in enumerate(wanting)}
        found = PendingTokens(tokens, norms, logprobs)
        found.compute()
        return found

    def _logprobs(self, logprobs: mx.array, drawn: mx.array) -> dict[Row, _RowLogprobs]:
        """Return the log probabilities of the rows that want them. `logprobs` (rows, vocab), `drawn` (rows,). Lazy."""
        wanting = self._wanting
        if len(wanting) < len(self._rows):
            logprobs, drawn = logprobs[mx.array(wanting)], drawn[mx.array(wanting)]
        rows = [self._rows[index] for index in wanting]
        step = StepLogprobs(logprobs, drawn, [row.request.top_logprobs or 0 for row in rows])
        return {row: _RowLogprobs(step, number) for number, row in enumerate(rows)}


def forward(
    network: Network, cache: list[Any], rows: Sequence[Row], tokens: mx.array, sampling: BatchSampling | None = None
) -> PendingTokens:
    """Feed each row its token (rows,), and return the next ones, which the device has begun to compute. Blocks only for
    rows with a grammar, which needs their last token. Writes to `cache`, and advances the rows' random keys and the
    processors. `sampling`: of these rows; None: of rows that are fed their last known token."""
    sampling = sampling or BatchSampling(rows, [False] * len(rows))
    pending = sampling.draw(network(tokens[:, None], cache=cache).squeeze(1), tokens)
    pending.compute()
    return pending
