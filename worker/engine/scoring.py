"""What a draft model attends to in a prompt while it begins the answer: a score for each of the prompt's tokens.

After SpecPrefill (arXiv 2502.02789). MLX's own attention is replaced for the time of a forward, and sees queries, keys
and masks as they are compared, so nothing here knows a family of models.
"""

import hashlib
import math
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache import layers
from worker.engine.kept import by_token
from worker.engine.prefill import Prefill
from worker.engine.prefix import PrefixCache
from worker.engine.row import Row
from worker.engine.upstream import make_prompt_cache
from worker.schedule.sequence import Sequence as Asked

# Tokens that look back at the prompt: its own last one, and the first ones of an answer. Of 4 the scores are of little
# use on the tiny model, of 16 they are no better.
LOOKAHEAD = 8
_POOL = 13  # tokens, an odd number; 9 were worse on the tiny model, and 21 no better
_MEMO = 16  # prompts; of 200,000 tokens each they take 13 MB

Scores = Sequence[float]  # one for each token of a prompt


class Draft:
    """For the engine's thread."""

    def __init__(
        self, network: nn.Module, prefix_bytes: int, context: int = 1 << 30, unread: int | None = None
    ) -> None:
        """`context`: the tokens that it was made for. `unread`: a token that it is not shown, and may not even know:
        it says nothing but that an image is there, of which a draft can make nothing."""
        self.network, self.prefix, self.context = network, PrefixCache(network, prefix_bytes), context
        self.unread = unread
        self._memo = OrderedDict[tuple[str, bytes], Scores]()

    def scoring(self, space: str, tokens: tuple[int, ...], boundaries: tuple[int, ...] = ()) -> "Scoring":
        """`tokens`: two at least. All are those of the prompt's own `Sequence`."""
        return Scoring(self, Asked("", tokens, LOOKAHEAD, space=space, boundaries=boundaries))

    def reads(self, tokens: tuple[int, ...]) -> int:
        """How many of them it is shown."""
        return len(tokens) - tokens.count(self.unread)

    def recall(self, asked: Asked) -> Scores | None:
        if (scores := self._memo.get(_key(asked))) is not None:
            self._memo.move_to_end(_key(asked))
        return scores

    def remember(self, asked: Asked, scores: Scores) -> None:
        self._memo[_key(asked)] = scores
        if len(self._memo) > _MEMO:
            self._memo.popitem(last=False)


def _key(asked: Asked) -> tuple[str, bytes]:
    return asked.space, hashlib.sha256(array("q", asked.prompt)).digest()


class Scoring:
    """One prompt on its way through the draft. Dropped at any time, it leaves nothing but what the draft's prefix cache
    has kept of it."""

    def __init__(self, draft: Draft, asked: Asked) -> None:
        self._draft, self._tokens, self._asked = draft, asked.prompt, _shown(asked, draft.unread)
        self._scores = draft.recall(self._asked)
        self._prefill = Prefill(draft.network, Row.of(self._asked), draft.prefix)
        self._prefill.look()
        self._lookahead: _Lookahead | None = None

    @property
    def scores(self) -> Scores | None:
        """None until all is computed. What the draft is not shown scores nothing."""
        if self._scores is None or len(self._scores) == len(self._tokens):
            return self._scores
        read = iter(self._scores)
        return array("f", (0.0 if token == self._draft.unread else next(read) for token in self._tokens))

    @property
    def total(self) -> int:
        """Tokens, with those that the draft finds in its prefix cache."""
        return self._prefill.total + LOOKAHEAD

    @property
    def remaining(self) -> int:
        """Tokens for the draft to compute; 0 when there are scores."""
        if self._scores is not None:
            return 0
        return self._lookahead.remaining if self._lookahead else self._prefill.remaining + LOOKAHEAD

    def advance(self, tokens: int) -> None:
        """So many at most; blocks until they are computed. The last `LOOKAHEAD` come one at a time, since each is a
        forward by itself.

        Raises ArithmeticError where the draft gave no numbers."""
        if self._scores is not None:
            return
        if self._lookahead is None:
            self._advance_prompt(tokens)
        else:
            self._lookahead.advance()
            if self._lookahead.remaining == 0:
                self._finish(self._lookahead.most)

    def skip(self) -> None:
        """What the draft's prefix cache has of it."""
        if self._scores is None and self._lookahead is None:
            self._prefill.look()
            self._prefill.skip()

    def _advance_prompt(self, tokens: int) -> None:
        self.skip()
        self._prefill.advance(min(tokens, self._prefill.remaining))
        if self._prefill.remaining == 0:
            cache, drawn, _ = self._prefill.finish()
            self._lookahead = _Lookahead(self._draft.network, cache, drawn.tokens, len(self._asked.prompt))

    def _finish(self, most: mx.array) -> None:
        scores: list[float] = _pooled(most).tolist()  # type: ignore[assignment]
        if not all(map(math.isfinite, scores)):
            self._draft.prefix.forget_unsound(self._asked.space, self._asked.prompt)
            raise ArithmeticError("The draft model gave no numbers for this prompt.")
        self._scores = array("f", scores)
        self._draft.remember(self._asked, self._scores)


def _shown(asked: Asked, unread: int | None) -> Asked:
    if unread not in asked.prompt:
        return asked
    places = [place for place, token in enumerate(asked.prompt) if token != unread]
    boundaries = tuple(bisect_left(places, boundary) for boundary in asked.boundaries)
    return replace(asked, prompt=tuple(asked.prompt[place] for place in places), boundaries=boundaries)


class _Lookahead:
    """A prompt's last token, and the likeliest ones behind it."""

    def __init__(self, network: nn.Module, cache: list[Any], last: mx.array, prompt: int) -> None:
        """`cache`: of all but the last token of the prompt; it is written to."""
        self._network, self._cache, self._next, self._prompt = network, cache, last, prompt
        self.most = mx.zeros(prompt)  # how much attention each token was given at most
        self.remaining = LOOKAHEAD

    def advance(self) -> None:
        with watched_attention(self._prompt + LOOKAHEAD - self.remaining) as watch:
            logits = self._network(self._next[None], cache=self._cache)
        self._next = mx.argmax(logits[:, -1], axis=-1)
        self.most = mx.stack([self.most, *(given[: self._prompt] for given in watch.given)]).max(axis=0)
        mx.eval(self._next, self.most)
        self.remaining -= 1


def _pooled(most: mx.array) -> mx.array:
    """Each with its neighbours, since what stands around a word says what it means. The paper does so for each head;
    over the most of them all it was as good, and is nearly free."""
    mean = mx.full((1, _POOL, 1), 1 / _POOL)
    return mx.conv1d(most[None, :, None], mean, padding=_POOL // 2).flatten()


# Attention, while one token is computed


@dataclass(slots=True)
class Watch:
    calls: int = 0
    given: list[mx.array] = field(default_factory=list)  # to each token, the most of all heads; by layer


@contextmanager
def watched_attention(tokens: int) -> Iterator[Watch]:
    """What the last of so many tokens attends to, in the layers that see all of them. Process-wide: for one forward on
    the engine's thread."""
    watch, attend = Watch(), mx.fast.scaled_dot_product_attention

    def watching(q: mx.array, k: mx.array, v: mx.array, *, scale: float, **how: Any) -> mx.array:
        watch.calls += 1
        # A layer that forgets has fewer keys. As long as it forgets nothing, they are in order.
        if q.shape[2] == 1 and k.shape[2] == tokens:
            watch.given.append(attention(q, k, scale=scale, **how).max(axis=0))
        return attend(q, k, v, scale=scale, **how)

    mx.fast.scaled_dot_product_attention = watching
    try:
        yield watch
    finally:
        mx.fast.scaled_dot_product_attention = attend


def attention(
    q: mx.array, k: mx.array, *, scale: float, mask: mx.array | str | None = None, sinks: mx.array | None = None
) -> mx.array:
    """(heads, keys): the share that each head of a single query gives to each key."""
    heads, groups, keys = q.shape[1], k.shape[1], k.shape[2]
    products = (q.reshape(1, groups, heads // groups, -1) * scale) @ k.swapaxes(-1, -2)
    products = products.reshape(1, heads, 1, keys)
    if isinstance(mask, mx.array):  # "causal" hides nothing; latent attention adds what knows positions
        products = mx.where(mask, products, -mx.inf) if mask.dtype == mx.bool_ else products + mask
    products = products.reshape(heads, keys).astype(mx.float32)
    whole = mx.logsumexp(products, axis=-1, keepdims=True)
    if sinks is not None:
        whole = mx.logaddexp(whole, sinks.astype(mx.float32)[:, None])
    return mx.exp(products - whole)


# At the start

_LONG = 1 << 18  # tokens: no layer that forgets looks back so far


def why_not_draft(target: Sequence[str], draft: Sequence[str], network: nn.Module) -> str | None:
    """Why this network cannot score prompts, and the way out; None where it can. `target` and `draft`: the tokens of
    the model and of its draft by id, "" where there is none. Computes nothing; not while another thread computes."""
    watch, attends, vocab = _watched_from_afar(network)
    if why_not := _why_not_its_tokens(target, draft, vocab):
        return f"{why_not}. Take a draft of the model's own family, which shares its tokens."
    if watch.given:
        return None
    family = type(network).__module__.rpartition(".")[2]
    if watch.calls:
        why_not = "none of its layers attends to the whole of a long prompt"
    elif attends:
        why_not = "mlx-lm writes its attention out, where it cannot be watched"
    else:
        why_not = "it has no attention"
    return f"{family} cannot be a draft: {why_not}. Take a model with full attention, such as a small Qwen3 or Llama."


def _watched_from_afar(network: nn.Module) -> tuple[Watch, bool, int]:
    """At the end of a long prompt, whether anything is kept by token, and the number of logits. All of it is lazy, so
    only shapes are known."""
    cache, token = make_prompt_cache(network), mx.zeros((1, 1), mx.int32)
    network(token, cache=cache)
    kept = [layer for layer in layers(cache) if by_token(layer) and layer.keys is not None]
    for layer in kept:
        layer.keys, layer.values = _lengthened(layer.keys), _lengthened(layer.values)
        layer.offset = _LONG
    with watched_attention(_LONG + 1) as watch:
        logits = network(token, cache=cache)
    return watch, bool(kept), logits.shape[-1]


def _lengthened(buffer: mx.array) -> mx.array:
    rows, heads, _, width = buffer.shape
    return mx.zeros((rows, heads, _LONG, width), buffer.dtype)


def _why_not_its_tokens(target: Sequence[str], draft: Sequence[str], vocab: int) -> str | None:
    """`vocab`: how many the network of the draft knows, those without a name too."""
    for token, (ours, its) in enumerate(zip(target, draft, strict=False)):
        if ours and its and ours != its:
            return f"Token {token} is {ours!r} to the model and {its!r} to its draft"
    unknown = (token for token, name in enumerate(target) if name and token >= vocab)
    if (first := next(unknown, None)) is not None:
        return f"The draft knows {vocab:,} tokens, and the model's token {first} is {target[first]!r}"
    return None
