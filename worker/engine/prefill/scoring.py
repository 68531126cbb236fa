"""Scores of a prompt's tokens: how much attention a draft model gives to each while it begins the answer.

After SpecPrefill (arXiv 2502.02789). MLX's attention function is replaced during a forward and receives queries, keys
and masks as they are compared, so this module depends on no model family."""

import copy
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

from worker.engine.batch.row import Row
from worker.engine.cache import slots
from worker.engine.cache.layers import layers
from worker.engine.cache.segments import is_sliceable, needs_states
from worker.engine.checkpoint import read_config, told_as
from worker.engine.model.drafter import tokens_read, why_not_same_tokens
from worker.engine.model.load import DraftModel, Model, OnLoaded, context_of, load_weights, model_folder, open_text
from worker.engine.model.profile import profile, weights_bytes
from worker.engine.prefill.spans import ComputeSpans
from worker.engine.prefill.task import PromptTask
from worker.engine.prefix.cache import PrefixCache
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.hooks import UnsupportedRope, observed_attention, rope_at
from worker.engine.upstream.mlx_lm import load_tokenizer, make_prompt_cache
from worker.errors import CannotStart
from worker.request import GenerationRequest

# Sparse prompts: some of their tokens are dropped, and each of the others has its original position.
#
# A cache counts its tokens, and models use that count as the position of the next one. Therefore MLX's rope is
# replaced during a forward by one that receives the positions. Decoding replaces nothing, since slots store a row's
# position separately from its length.


def why_not_sparse(network: nn.Module, context: int) -> str | None:
    """Return why SpecPrefill cannot be used with this model for prompts of up to `context` tokens; None if it can. The
    model's rows must be able to share a batch.

    Computes a few tokens, so it loads the weights. Blocks. Must not run while another thread computes."""
    cache, trial = make_prompt_cache(network), 4  # tokens
    try:
        with rope_at([*range(trial)], 0):
            network(mx.zeros((1, trial), mx.int32), cache=cache)
        # Some models use positions only beyond a threshold. The nearest come first, since position tables are finite.
        first, *others = (_logits_at(network, cache, trial, at) for at in (trial, trial + 1, context - 1))
    except UnsupportedRope as error:
        return f"This model rotates tokens by positions of its own: {error}."
    if all(mx.array_equal(first, other, equal_nan=True) for other in others):
        return None
    return "This model uses token positions not only in MLX's rope, but also in a table or a scale."


def _logits_at(network: nn.Module, cache: list[Any], length: int, position: int) -> mx.array:
    """Return the logits of the next token of a row of this length at a position of which only the rope replacement is
    informed. Lazy. If they differ between positions, the model uses the position elsewhere."""
    batch = slots.batch_of(copy.deepcopy(cache), position)
    with rope_at([length], position):
        logits: mx.array = network(mx.zeros((1, 1), mx.int32), cache=batch)
    return logits


# Queries whose attention is recorded: the prompt's last token, and the first tokens of an answer. On the tiny model, 4
# gave scores of little use, and 16 no better ones than 8.
LOOKAHEAD = 8

Scores = Sequence[float]  # one for each token of a prompt


class DraftScorer:
    """A draft model with its prefix cache, and the scores of recent prompts. For the engine's thread."""

    def __init__(
        self, network: nn.Module, prefix_bytes: int, context: int = 1 << 30, skip_token_id: int | None = None
    ) -> None:
        """`prefix_bytes`: the largest size of its prefix cache. `context`: tokens that it was trained for.
        `skip_token_id`: id of a token that is removed before the draft reads a prompt, and may be outside its
        vocabulary: the image placeholder."""
        self.network = network
        self.prefix = PrefixCache(network, prefix_bytes)
        self.context = context
        self.skip_token_id = skip_token_id
        self._memo = OrderedDict[tuple[str, bytes], Scores]()

    def scoring(self, namespace: str, tokens: tuple[int, ...], boundaries: tuple[int, ...] = ()) -> "Scoring":
        """Return a new scoring of a prompt of at least two tokens. `namespace`, `tokens` and `boundaries` are those of
        the prompt's own `GenerationRequest`."""
        return Scoring(self, GenerationRequest("", tokens, LOOKAHEAD, namespace=namespace, boundaries=boundaries))

    def num_scored(self, tokens: tuple[int, ...]) -> int:
        """Return the number of these tokens that the draft reads."""
        return len(tokens) - tokens.count(self.skip_token_id)

    def cached_scores(self, request: GenerationRequest) -> Scores | None:
        """Return the remembered scores of this prompt, or None."""
        if (scores := self._memo.get(_key(request))) is not None:
            self._memo.move_to_end(_key(request))
        return scores

    def cache_scores(self, request: GenerationRequest, scores: Scores) -> None:
        """Store the scores of a prompt; the least recently used are dropped."""
        self._memo[_key(request)] = scores
        if len(self._memo) > 16:  # prompts; 13 MB if each has 200,000 tokens
            self._memo.popitem(last=False)


def _key(request: GenerationRequest) -> tuple[str, bytes]:
    return request.namespace, hashlib.sha256(array("q", request.prompt)).digest()


class Scoring:
    """The scoring of one prompt. It may be dropped at any time; then only entries in the draft's prefix cache
    remain."""

    def __init__(self, draft: DraftScorer, request: GenerationRequest) -> None:
        self._draft = draft
        self._tokens = request.prompt
        self._request = _without_skipped(request, draft.skip_token_id)
        self._scores = draft.cached_scores(self._request)
        self._task = PromptTask(Row.of(self._request), ComputeSpans(draft.network, self._request), prefix=draft.prefix)
        self._task.refresh()
        self._lookahead: _Lookahead | None = None

    @property
    def scores(self) -> Scores | None:
        """One score per token of the prompt, or None until all is computed. Tokens that the draft does not read score
        0."""
        if self._scores is None or len(self._scores) == len(self._tokens):
            return self._scores
        read = iter(self._scores)
        return array("f", (0.0 if token == self._draft.skip_token_id else next(read) for token in self._tokens))

    @property
    def total(self) -> int:
        """Tokens that the draft computes or takes from its prefix cache."""
        return self._task.stage.total + LOOKAHEAD

    @property
    def remaining(self) -> int:
        """Tokens left for the draft to compute; 0 once there are scores."""
        if self._scores is not None:
            return 0
        return self._lookahead.remaining if self._lookahead else self._task.stage.remaining + LOOKAHEAD

    def load_prefix(self) -> None:
        """Load the longest prefix from the draft's prefix cache. Blocks."""
        if self._scores is None and self._lookahead is None:
            self._task.load()

    def advance(self, tokens: int) -> int:
        """Compute up to `tokens` tokens of the prompt, or one of the last `LOOKAHEAD` tokens, each of which takes its
        own forward. Blocks. Returns the number computed.

        Raises ArithmeticError if the draft's scores are not finite."""
        if self._scores is not None:
            return 0
        if self._lookahead is None:
            return self._advance_prompt(tokens)
        self._lookahead.advance()
        if self._lookahead.remaining == 0:
            self._finish(self._lookahead.max_weights)
        return 1

    def _advance_prompt(self, tokens: int) -> int:
        advanced = self._task.advance(tokens)
        if self._task.is_computed:
            row = self._task.finish()
            self._lookahead = _Lookahead(self._draft.network, row.cache, row.pending.tokens, len(self._request.prompt))
        return advanced.tokens

    def _finish(self, max_weights: mx.array) -> None:
        scores: list[float] = _pooled(max_weights).tolist()  # type: ignore[assignment]
        if not all(map(math.isfinite, scores)):
            self._draft.prefix.forget_non_finite(self._request.namespace, self._request.prompt)
            raise ArithmeticError("The draft's scores for this prompt are not finite.")
        self._scores = array("f", scores)
        self._draft.cache_scores(self._request, self._scores)


def _without_skipped(request: GenerationRequest, skip_token_id: int | None) -> GenerationRequest:
    if skip_token_id not in request.prompt:
        return request
    positions = [position for position, token in enumerate(request.prompt) if token != skip_token_id]
    boundaries = tuple(bisect_left(positions, boundary) for boundary in request.boundaries)
    return replace(request, prompt=tuple(request.prompt[position] for position in positions), boundaries=boundaries)


class _Lookahead:
    """Computes a prompt's last token, then the most likely next tokens one by one, and records their attention."""

    def __init__(self, network: nn.Module, cache: list[Any], last: mx.array, prompt: int) -> None:
        """`cache` holds all tokens of the prompt but the last, and is written to."""
        self._network = network
        self._cache = cache
        self._next = last
        self._prompt = prompt
        self.max_weights = mx.zeros(prompt)  # the largest attention weight that each token received
        self.remaining = LOOKAHEAD

    def advance(self) -> None:
        with probe_attention(self._prompt + LOOKAHEAD - self.remaining) as probe:
            logits = self._network(self._next[None], cache=self._cache)
        self._next = mx.argmax(logits[:, -1], axis=-1)
        self.max_weights = mx.stack([self.max_weights, *(weights[: self._prompt] for weights in probe.weights)]).max(
            axis=0
        )
        mx.eval(self._next, self.max_weights)
        self.remaining -= 1


def _pooled(max_weights: mx.array) -> mx.array:
    """Average each score with its neighbours', since adjacent tokens give a word its meaning. The paper does this for
    each head; for the maximum over all heads the result was as good, and it costs almost nothing."""
    width = 13  # tokens, an odd number; on the tiny model 9 was worse, and 21 no better
    mean = mx.full((1, width, 1), 1 / width)
    return mx.conv1d(max_weights[None, :, None], mean, padding=width // 2).flatten()


# Recording attention while one token is computed


@dataclass(slots=True)
class _AttentionProbe:
    """Record of the attention calls of one forward."""

    calls: int = 0
    weights: list[mx.array] = field(default_factory=list)  # by layer: for each token the largest weight among the heads


@contextmanager
def probe_attention(tokens: int) -> Iterator[_AttentionProbe]:
    """Record the attention that the last of `tokens` tokens gives to all of them, in layers without a shorter window.
    For one forward."""
    probe = _AttentionProbe()

    def record(q: mx.array, k: mx.array, v: mx.array, *, scale: float, **how: Any) -> None:
        probe.calls += 1
        # A layer with a window has fewer keys once it is full; before that, its keys are in order too.
        if q.shape[2] == 1 and k.shape[2] == tokens:
            probe.weights.append(attention(q, k, scale=scale, **how).max(axis=0))

    with observed_attention(record):
        yield probe


def attention(
    q: mx.array, k: mx.array, *, scale: float, mask: mx.array | str | None = None, sinks: mx.array | None = None
) -> mx.array:
    """Return attention weights (heads, keys) in float32 of one query. `q`: (1, heads, 1, head_dim); `k`: (1, kv_heads,
    keys, head_dim); `mask` and `sinks` as in mx.fast.scaled_dot_product_attention. Lazy."""
    heads = q.shape[1]
    groups, keys = k.shape[1:3]
    products = (q.reshape(1, groups, heads // groups, -1) * scale) @ k.swapaxes(-1, -2)
    products = products.reshape(1, heads, 1, keys)
    if isinstance(mask, mx.array):  # "causal" hides nothing here; latent attention adds its positional part as a mask
        products = mx.where(mask, products, -mx.inf) if mask.dtype == mx.bool_ else products + mask
    products = products.reshape(heads, keys).astype(mx.float32)
    normalizer = mx.logsumexp(products, axis=-1, keepdims=True)
    if sinks is not None:
        normalizer = mx.logaddexp(normalizer, sinks.astype(mx.float32)[:, None])
    return mx.exp(products - normalizer)


# Checks at start


def why_not_draft(target: Sequence[str], draft: Sequence[str], network: nn.Module) -> str | None:
    """Return why this network cannot be the draft, and what to do; None if it can. `target` and `draft`: tokens of the
    model and of its draft by id, "" for ids without a token. Builds lazy graphs and computes nothing. Must not run
    while another thread computes."""
    probe, attends, vocab = _probe_long_prompt(network)
    if why_not := why_not_same_tokens(target, draft, vocab):
        return why_not
    if probe.weights:
        return None
    family = type(network).__module__.rpartition(".")[2]
    if probe.calls:
        why_not = "none of its layers attends to all tokens of a long prompt"
    elif attends:
        why_not = "mlx-lm implements its attention without MLX's function, so it cannot be recorded"
    else:
        why_not = "it has no attention"
    return f"{family} cannot be a draft: {why_not}. Choose a model with full attention, such as a small Qwen3 or Llama."


def _probe_long_prompt(network: nn.Module) -> tuple[_AttentionProbe, bool, int]:
    """Return the attention record at the end of a long prompt, whether any layer keeps keys by token, and the number of
    logits. Everything is lazy, so only shapes are known."""
    long = 1 << 18  # tokens: longer than any sliding window
    cache, token = make_prompt_cache(network), mx.zeros((1, 1), mx.int32)
    network(token, cache=cache)
    kept = [layer for layer in layers(cache) if is_sliceable(layer) and layer.keys is not None]
    for layer in kept:
        layer.keys, layer.values = _lengthened(layer.keys, long), _lengthened(layer.values, long)
        layer.offset = long
    with probe_attention(long + 1) as probe:
        logits = network(token, cache=cache)
    return probe, bool(kept), logits.shape[-1]


def _lengthened(buffer: mx.array, tokens: int) -> mx.array:
    rows, heads, _, width = buffer.shape
    return mx.zeros((rows, heads, tokens, width), buffer.dtype)


def with_draft(model: Model, path_or_hub_id: str, on_loaded: OnLoaded | None = None) -> Model:
    """Return the model with its draft loaded. Blocks; must run on the thread that will compute. Raises `CannotStart`
    with the reason and what to do."""
    setting = f"SLUICE_SPECPREFILL_DRAFT_MODEL={path_or_hub_id}"
    path = model_folder(path_or_hub_id, name=setting)
    read_config(path, setting)
    with told_as(lambda reason: f"{setting}: mlx-lm cannot load it: {reason}"):
        draft, config, _ = open_text(path, trusted=False)
        tokens = MLXTokenizer(load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))).tokens
        why_not = why_not_draft(tokens_read(model), tokens, draft)
        if why_not is None:
            load_weights(draft, on_loaded)
            why_not = why_not_sparse(model.network, model.context)
    if why_not:
        raise CannotStart(f"{setting}: {why_not}")
    draft_costs = profile(draft, config).costs(weights_bytes=weights_bytes(draft))
    costs = replace(model.costs, draft_bytes=draft_costs.weights_bytes, draft=draft_costs)
    return replace(model, draft=DraftModel(draft, context_of(config), needs_states(draft)), costs=costs)
