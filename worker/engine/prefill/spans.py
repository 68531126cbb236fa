"""Computes the spans of a prompt's tokens that are not dropped. A dense prefill has a single span, the whole prompt."""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.batch.row import PendingTokens, Row, forward
from worker.engine.cache import slots
from worker.engine.cache.kinds import kind_of
from worker.engine.cache.layers import layers
from worker.engine.cache.pack import Pack
from worker.engine.prefill.stage import Phase, Stage, StageProgress
from worker.engine.speculation.mtp import Head, PromptEntries, PromptHead
from worker.engine.upstream.hooks import rope_at
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.engine.vision.inputs import MultimodalInputs
from worker.outcomes import Prefilled, SpecPrefillSkipped
from worker.request import GenerationRequest, Range

Ranges = Sequence[Range]  # in order


@dataclass(frozen=True, slots=True)
class PackRow:
    """One prompt's next tokens, and what a forward that it shares with other prompts needs to compute them."""

    tokens: tuple[int, ...]
    cache: list[Any]
    length: int  # tokens in the cache
    position: int  # of the next token


class ComputeSpans(Stage):
    """Computes all kept tokens but the last one, which is the row's first input when it decodes. A resumed request's
    earlier tokens count as prompt and are always kept.

    Tokens before the first dropped one are computed densely, so that their KV state can be reused. Later ones must be
    rotated by their positions in the prompt: see `rope_at`."""

    phase: Phase = Prefilled.phase
    length: int = 0  # tokens in the row's cache
    cached: int = 0  # of these, the tokens that were loaded from the prefix cache

    def __init__(
        self,
        network: nn.Module,
        request: GenerationRequest,
        inputs: MultimodalInputs | None = None,
        *,
        optional: bool = False,
        head: Head | None = None,
    ) -> None:
        """`inputs`: the inputs of a prompt with images. It must have the features of all images that are computed.
        `optional`: the whole prompt may be computed instead. `head`: an MTP head, whose trunk is the network.

        Raises ValueError for `kept_ranges` that are unordered, miss the end of the prompt or a sliding window, or keep
        a single token."""
        self._id = request.id
        self._optional = optional
        self._network = network
        self._inputs = inputs
        self._head = head
        self._entries = PromptHead(head) if head and not inputs else None
        self._tokens = request.tokens
        self.cache: list[Any] = make_prompt_cache(network)
        self._matched = 0
        self._positions: Sequence[int] = range(len(self._tokens))
        self.num_dense = self.total  # tokens before the first dropped one
        if request.kept_ranges is not None:
            _check_ranges(request.kept_ranges, len(request.prompt), window_of(self.cache))
            spans = *request.kept_ranges, (len(request.prompt), len(self._tokens))
            self._positions = [at for start, end in spans for at in range(start, end)]
            self.num_dense = min(dense_prefix_len(request.kept_ranges), self.total)
            if not self.total:
                raise ValueError("kept: a row needs at least two kept tokens.")

    @property
    def total(self) -> int:
        """Tokens in the cache at the end."""
        return len(self._positions) - 1

    @property
    def remaining(self) -> int:
        """Tokens left to compute."""
        return self.total - max(self.length, self._matched)

    @property
    def report(self) -> Prefilled:
        """The progress of the prefill."""
        return Prefilled(self._id, self.done, self.total, self.cached)

    @property
    def fallback(self) -> SpecPrefillSkipped | None:
        """Compute the whole prompt instead, if that is possible."""
        reason = "The prefill of the kept tokens failed; the worker's log has the reason."
        return SpecPrefillSkipped(self._id, reason) if self._optional else None

    @property
    def held_tokens(self) -> int:
        """Tokens in the row's cache."""
        return self.length

    @property
    def start(self) -> int:
        """Index of the first token that is neither computed nor in the prefix cache."""
        return self._positions[max(self.length, self._matched)]

    @property
    def can_share(self) -> bool:
        """True if the next tokens can be computed in one forward with those of other prompts: none is dropped, and
        images come only before them."""
        all_kept = self.num_dense == self.total
        return all_kept and (self._inputs is None or self._inputs.last_end <= max(self.length, self._matched))

    def expect(self, matched: int) -> None:
        """Count the first `matched` tokens as cached, until the next call or `load`."""
        self._matched = matched

    def load(self, cache: list[Any], length: int) -> None:
        """Continue from a cache with the first `length` tokens, loaded from the prefix cache; it belongs to this object
        from now on. Raises ValueError if one of these tokens is dropped."""
        self._continue(cache, length, self.cached + length - self.length, self._entries)

    def _continue(self, cache: list[Any], length: int, cached: int, entries: PromptHead | None) -> None:
        if length > self.num_dense:
            raise ValueError(f"length: {length} tokens are cached; only the first {self.num_dense} are all kept.")
        self.cache = cache
        self.length = length
        self.cached = cached
        self._matched = 0
        self._entries = entries

    def narrowed(self, request: GenerationRequest) -> "ComputeSpans":
        """Return a new stage for those tokens of the prompt that `request` keeps. It continues with this stage's cache.
        Raises ValueError if the cache holds a token that is dropped."""
        spans = ComputeSpans(self._network, request, self._inputs, optional=request.num_dropped > 0, head=self._head)
        spans._continue(self.cache, self.length, self.cached, self._entries)
        return spans

    def again(self, request: GenerationRequest) -> "ComputeSpans":
        """Return a new stage for the same prompt, with an empty cache."""
        return ComputeSpans(self._network, request, self._inputs, head=self._head)

    def end_of(self, tokens: int) -> int:
        """Return the number of tokens in the cache after a chunk of `tokens`, moved out of an image that must be
        computed in one piece."""
        end = min(self.total, self.length + tokens)
        if self._inputs is None or not self.length < end < self.total:
            return end
        return bisect_left(self._positions, self._inputs.end(self._positions[self.length], self._positions[end]))

    def advance(self, tokens: int) -> StageProgress:
        """Compute up to `tokens` tokens in one forward, or more if an image must be computed in one piece. Blocks.
        Raises `UnsupportedRope`."""
        end = self.end_of(tokens)
        if self.length < self.num_dense:
            end = min(end, self.num_dense)
        if positions := self._positions[self.length : end]:
            with nullcontext() if self.length < self.num_dense else rope_at([*positions], self.length):
                self._compute(positions)
            slots.materialize(self.cache)
            if self._head and self._entries:
                self._feed_head(self._head.trunk.take_hidden(), positions)
            self.length += len(positions)
        return StageProgress(len(positions))

    def pack_row(self, tokens: int) -> PackRow:
        """Return what a pack needs to compute the next `tokens` tokens. Requires `can_share`."""
        chunk = self._tokens[self.length : self.length + tokens]
        position = self.length + (self._inputs.rope_delta if self._inputs else 0)
        return PackRow(chunk, self.cache, self.length, position)

    def unpack(self, pack: Pack, index: int, tokens: int, hidden: mx.array | None = None) -> StageProgress:
        """Take the next `tokens` tokens from a pack in which they were computed as row `index`. Blocks. `hidden`: the
        hidden states (rows, tokens, hidden_size) of the pack, if the model has an MTP head."""
        pack.unpack(index)
        slots.materialize(self.cache)
        if hidden is not None:
            self._feed_head(hidden[index : index + 1, :tokens], self._positions[self.length : self.length + tokens])
        self.length += tokens
        return StageProgress(tokens)

    def _compute(self, positions: Sequence[int]) -> None:
        if self._inputs:  # a family with its own positions does not call MLX's rope
            self._inputs.read(self.cache, positions)
        else:
            self._network(mx.array([[self._tokens[at] for at in positions]]), cache=self.cache)

    def _feed_head(self, hidden: mx.array, positions: Sequence[int]) -> None:
        """Add the entries of these tokens, unless tokens between them are dropped."""
        if self._entries and positions[-1] - positions[0] == len(positions) - 1:
            self._entries.feed(hidden, self._tokens[positions[0] + 1 : positions[-1] + 2], positions[0])

    @property
    def entries(self) -> PromptEntries | None:
        """The entries of an MTP head for the row; None if there are none."""
        return self._entries.finish() if self._entries else None

    def finish(self, row: Row) -> tuple[list[Any], PendingTokens, int | None]:
        """Return the row's cache, its next input, and the position of that input, or None if it equals the cache's
        length. The caller owns the cache; the stage must not be used afterwards. Lazy."""
        assert self.length == self.total, "tokens are missing"
        last = self._positions[-1]
        token = PendingTokens.known([self._tokens[last]])
        if self.length:
            position = last + (self._inputs.rope_delta if self._inputs else 0)
            return self.cache, token, position
        # A cache without tokens cannot join a batch: for some models an absent state differs from a state of zeros.
        row.mark_fed()
        return self.cache, forward(self._network, self.cache, [row], token.tokens), None


def dense_prefix_len(kept_ranges: Ranges) -> int:
    """Return the number of tokens before the first dropped one: the part of a prefix that can be reused."""
    end = 0
    for start, after in kept_ranges:
        if start > end:
            break
        end = after
    return end


def window_of(cache: Sequence[Any]) -> int:
    """Return the longest sliding window among the layers, in tokens; 0 if there is none."""
    return max((kind_of(layer).window(layer) or 0 for layer in layers(cache)), default=0)


def _check_ranges(kept_ranges: Ranges, prompt: int, window: int) -> None:
    edges = [edge for span in kept_ranges for edge in span]
    if not edges or edges[0] < 0 or edges != sorted(edges) or any(start == end for start, end in kept_ranges):
        raise ValueError("kept: ranges must be in order and not empty.")
    if edges[-1] != prompt:
        raise ValueError(f"kept: the last range must end at {prompt}, the end of the prompt, not at {edges[-1]}.")
    # A window counts cached tokens, so it has its usual content only if none of these was dropped.
    first = max(0, prompt - window)
    if sum(max(0, end - max(start, first)) for start, end in kept_ranges) < prompt - first:
        raise ValueError(
            f"kept: the last {window} tokens must be kept, since some layers have a window of {window} tokens."
        )
