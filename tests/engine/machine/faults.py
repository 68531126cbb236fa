"""Failures on purpose, at the borders of the engine: embeddings, the vision encoder, and what allocates memory.

Some follow from the content of a request: a token that raises, a token without a finite embedding, an image that the
encoder refuses. Such a request fails whenever it is computed. Others are armed and happen once, to whoever is next."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.engine.machine.families import Family
from tests.engine.vision import cases
from tests.engine.vision.cases import Prompt
from worker.engine.batch.decode_batch import DecodeBatch
from worker.engine.cache import prefix
from worker.engine.cache.slot_kv import SlotKVCache, SlotRotatingKVCache
from worker.engine.cache.slots import SlotArraysCache
from worker.engine.vision.encoder import Features

REFUSED, NOT_FINITE = (8, 24, 16), (9, 24, 16)  # images

# The forward of a group, the wait for its tokens, the forward of a chunk, and what allocates.
Once = Literal["decode", "collect", "chunk", "extend", "moved", "filter", "extract", "copy_segment", "restore_cache"]
ONCE: tuple[Once, ...] = get_args(Once)
COSTS_A_ROW = {"chunk", "extend", "restore_cache"}  # one that is being prefilled; the others cost none
_SLOTS = SlotKVCache, SlotRotatingKVCache, SlotArraysCache


class OutOfMemory(RuntimeError):
    def __init__(self) -> None:
        super().__init__("[malloc] Unable to allocate 1000000000 bytes.")


class Faults:
    """`content`: whether tokens and images have their effect. Nothing fails outside of `active`."""

    def __init__(self, family: Family, *, content: bool) -> None:
        self.content = content
        self.raising, self.not_finite, self.raising_in_draft = family.unused
        self.fired = list[Once]()
        self._family, self._armed = family, None
        self._armed: Once | None
        model = family.model
        assert model.draft is not None
        networks = [model.network, *([model.vision.network.language_model] if model.vision else [])]
        self._embeddings = [each for network in networks for each in _embeddings(network, model.vocab)]
        self._draft = _embeddings(model.draft.network, None)
        self._refused = [cases.processed(family.name, *REFUSED)] if family.sees else []
        self._not_finite = [cases.processed(family.name, *NOT_FINITE)] if family.sees else []

    def arm(self, once: Once) -> None:
        self._armed = once

    @property
    def armed(self) -> bool:
        return self._armed is not None

    @property
    def rows_that_may_fail(self) -> int:
        """Number of rows that were in a prefill when it was made to fail."""
        return sum(once in COSTS_A_ROW for once in self.fired)

    @property
    def bad_keys(self) -> set[int]:
        """The cache keys of what is computed and is not finite."""
        tokens = {self.not_finite} if self.content else set()
        return tokens | {-1 - int.from_bytes(sight.digest, "big") for sight in self._not_finite}

    def spoils(self, prompt: Prompt) -> bool:
        """Return True if the images of a prompt make it fail."""
        return self.content and any(sight in (*self._refused, *self._not_finite) for sight in prompt.images)

    @contextmanager
    def active(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Embedding, "__call__", self._embed(nn.Embedding.__call__))
            if self._family.model.vision and self.content:
                vision = self._family.model.vision.family
                patch.setattr(vision, "encode", self._encode(vision.encode))
            if self._armed in ("extend", "moved", "filter", "extract"):
                for kind in _SLOTS:
                    patch.setattr(kind, self._armed, self._once(self._armed, getattr(kind, self._armed)))
            elif self._armed in ("copy_segment", "restore_cache"):
                patch.setattr(prefix, self._armed, self._once(self._armed, getattr(prefix, self._armed)))
            elif self._armed == "collect":
                patch.setattr(DecodeBatch, "collect", self._collect(DecodeBatch.collect))
            yield

    def _embed(
        self, embed: Callable[[nn.Embedding, mx.array], mx.array]
    ) -> Callable[[nn.Embedding, mx.array], mx.array]:
        def call(layer: nn.Embedding, tokens: mx.array) -> mx.array:
            if any(layer is each for each in self._draft):
                self._raise_on(self.raising_in_draft, tokens)
            if tokens.ndim != 2 or not any(layer is each for each in self._embeddings):
                return embed(layer, tokens)
            rows, count = tokens.shape
            self._fail_once("decode" if rows > 1 else "chunk", happens=rows > 1 or count > 1)
            self._raise_on(self.raising, tokens)
            blurred = (tokens == self.not_finite) & self.content
            return mx.where(blurred[..., None], mx.nan, embed(layer, tokens))

        return call

    def _raise_on(self, token: int, tokens: mx.array) -> None:
        if self.content and bool((tokens == token).any()):
            raise RuntimeError(f"Token {token} fails on purpose.")

    def _fail_once(self, once: Once, *, happens: bool = True) -> None:
        if happens and self._armed == once:
            self._armed = None
            self.fired.append(once)
            raise OutOfMemory

    def _once(self, once: Once, call: Callable[..., Any]) -> Callable[..., Any]:
        def fails(*given: Any, **named: Any) -> Any:
            self._fail_once(once)
            return call(*given, **named)

        return fails

    def _collect(self, collect: Callable[[DecodeBatch], Any]) -> Callable[[DecodeBatch], Any]:
        def fails(batch: DecodeBatch) -> Any:
            self._fail_once("collect", happens=len(batch.rows) > 1)
            return collect(batch)

        return fails

    def _encode(self, encode: Callable[[Any, list[mx.array]], Features]) -> Callable[[Any, list[mx.array]], Features]:
        def call(given: Any, passed: list[mx.array]) -> Features:
            if any(given is sight.pixel_inputs for sight in self._refused):
                raise RuntimeError("This image fails on purpose.")
            features = encode(given, passed)
            if any(given is sight.pixel_inputs for sight in self._not_finite):
                return Features(features.rows * mx.nan, features.deepstack)
            return features

        return call


def _embeddings(network: nn.Module, vocab: int | None) -> list[nn.Embedding]:
    layers = (each for each in network.modules() if isinstance(each, nn.Embedding))
    return [each for each in layers if vocab in (None, each.weight.shape[0])]
