"""Failures on purpose, at the borders of the engine: embeddings, the vision encoder, and calls that allocate memory.

Some follow from the content of a request: a token that raises, a token without a finite embedding, an image that the
encoder refuses. Such a request fails whenever it is computed. Others are armed, and happen once."""

import logging
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
from worker.engine.cache.kv import SlotKVCache
from worker.engine.cache.recurrent import SlotArraysCache
from worker.engine.cache.rotating import SlotRotatingKVCache
from worker.engine.prefix import cache as prefix
from worker.engine.vision.feature_cache import Features

REFUSED, NOT_FINITE = (8, 24, 16), (9, 24, 16)  # images

# The forward of a group, the wait for its tokens, the forward of prompts or of drafts, the middle of any forward, and
# calls that allocate memory or decide what rows keep of their drafts.
Once = Literal[
    "decode",
    "collect",
    "chunk",
    "attention",
    "extend",
    "moved",
    "filter",
    "extract",
    "commit",
    "copy_segment",
    "restore_cache",
]
ONCE: tuple[Once, ...] = get_args(Once)
# One that is being prefilled, or that decodes in a group of its own; the others cost none.
COSTS_A_ROW = {"chunk", "attention", "extend", "restore_cache"}
_SLOTS = SlotKVCache, SlotRotatingKVCache, SlotArraysCache


class OnPurpose(RuntimeError):
    """A failure that the machine causes. The engine must not raise any other."""


class OutOfMemory(OnPurpose):
    def __init__(self) -> None:
        super().__init__("[malloc] Unable to allocate 1000000000 bytes.")


class Surprises(logging.Handler):
    """Collects the exceptions that the engine logs, and so survives, but for those on purpose."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors = list[BaseException]()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, OnPurpose):
            self.errors.append(error)


class Faults:
    """The failures of one sequence. Nothing fails on purpose outside of `active`."""

    def __init__(self, family: Family, *, content: bool) -> None:
        """`content`: tokens and images have their effect."""
        self.content = content
        self.tokens = family.unused
        self.raising, self.not_finite, self.raising_in_draft = self.tokens
        self.fired = list[Once]()
        self.surprises = Surprises()
        self._family = family
        self._armed: Once | None = None
        self._spared = 0  # calls that succeed before the armed one fails
        model = family.model
        assert model.draft is not None
        networks = [model.network, *([model.vision.network.language_model] if model.vision else [])]
        self._embeddings = [each for network in networks for each in _embeddings(network, model.vocab)]
        self._draft = _embeddings(model.draft.network, None)
        self._refused = [cases.processed(family.name, *REFUSED)] if family.sees else []
        self._not_finite = [cases.processed(family.name, *NOT_FINITE)] if family.sees else []

    def arm(self, once: Once, spared: int) -> None:
        """Let a call fail once, after `spared` further calls that succeed."""
        self._armed = once
        self._spared = spared

    @property
    def armed(self) -> bool:
        return self._armed is not None

    @property
    def rows_that_may_fail(self) -> int:
        """Most rows that the failures so far may have cost."""
        return sum(once in COSTS_A_ROW for once in self.fired)

    @property
    def bad_keys(self) -> set[int]:
        """The cache keys of tokens and images whose embedding is not finite."""
        tokens = {self.not_finite} if self.content else set()
        return tokens | {-1 - int.from_bytes(sight.digest, "big") for sight in self._not_finite}

    def spoils(self, prompt: Prompt) -> bool:
        """Return True if the images of a prompt make it fail."""
        return self.content and any(sight in (*self._refused, *self._not_finite) for sight in prompt.images)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let calls of the engine fail, and collect the exceptions that it logs, while the context is open."""
        with pytest.MonkeyPatch.context() as patch, _handled_by(self.surprises):
            patch.setattr(nn.Embedding, "__call__", self._embed(nn.Embedding.__call__))
            if self._family.model.vision and self.content:
                vision = self._family.model.vision.family
                patch.setattr(vision, "encode", self._encode(vision.encode))
            if self._armed in ("extend", "moved", "filter", "extract", "commit"):
                for kind in _SLOTS:
                    patch.setattr(kind, self._armed, self._once(self._armed, getattr(kind, self._armed)))
            elif self._armed in ("copy_segment", "restore_cache"):
                patch.setattr(prefix, self._armed, self._once(self._armed, getattr(prefix, self._armed)))
            elif self._armed == "attention":
                attend = mx.fast.scaled_dot_product_attention
                patch.setattr(mx.fast, "scaled_dot_product_attention", self._once("attention", attend))
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
            self._fail_once("chunk" if count > 1 else "decode", happens=rows > 1 or count > 1)
            self._raise_on(self.raising, tokens)
            blurred = (tokens == self.not_finite) & self.content
            return mx.where(blurred[..., None], mx.nan, embed(layer, tokens))

        return call

    def _raise_on(self, token: int, tokens: mx.array) -> None:
        if self.content and bool((tokens == token).any()):
            raise OnPurpose(f"Token {token} fails.")

    def _fail_once(self, once: Once, *, happens: bool = True) -> None:
        if not happens or self._armed != once:
            return
        if self._spared:
            self._spared -= 1
            return
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
                raise OnPurpose("This image fails.")
            features = encode(given, passed)
            if any(given is sight.pixel_inputs for sight in self._not_finite):
                return Features(features.rows * mx.nan, features.deepstack)
            return features

        return call


@contextmanager
def _handled_by(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("sluice.engine")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _embeddings(network: nn.Module, vocab: int | None) -> list[nn.Embedding]:
    layers = (each for each in network.modules() if isinstance(each, nn.Embedding))
    return [each for each in layers if vocab in (None, each.weight.shape[0])]
