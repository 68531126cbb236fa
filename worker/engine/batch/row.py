"""One request in the engine, from admission to its last token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from worker.engine.sampling.processors import needs_prompt
from worker.engine.sampling.sampler import SamplingKind, draw_key, kind_of
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
        kind, num_dropped = kind_of(request.sampling), request.num_dropped
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
    def suspect(self) -> bool:
        """True if it may be the cause of a failure: its cache was lost, and it has produced no token since."""
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
