"""Hooks into upstream: each is still called by the models, one is open at a time, and originals are always restored.
When an upgrade moves what is replaced, it fails here first."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3_5

from models.tiny_vision import CONFIGS
from tests.engine.tiny import network, prompt
from tests.engine.vision import cases
from worker.engine.upstream.hooks import (
    UnsupportedRope,
    observed_attention,
    recorded_layers,
    replaced_recurrence,
    rope_at,
    wrapped_calls,
)
from worker.engine.upstream.mlx_lm import make_prompt_cache

TOKENS = 6
FAMILIES = "llama", "qwen3_5", "gemma3", "gpt_oss", "deepseek_v3"


def logits(family: str, hook: AbstractContextManager[None] | None = None) -> mx.array:
    cache, tokens = make_prompt_cache(network(family)), mx.array([prompt(TOKENS, 1)])
    with hook or nullcontext():
        computed: mx.array = network(family)(tokens, cache=cache)
    return computed


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(2, 2), nn.Linear(2, 2)]


def call_original(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return call(*given, **named)


ENCODER = Encoder()
HOOKS: dict[str, tuple[Callable[[], AbstractContextManager[None]], Callable[[], Any]]] = {
    "rope": (lambda: rope_at([0], 0), lambda: mx.fast.rope),
    "attention": (lambda: observed_attention(lambda *_, **__: None), lambda: mx.fast.scaled_dot_product_attention),
    "recurrence": (
        lambda: replaced_recurrence([qwen3_5.__name__], call_original, call_original, lambda _: None),
        lambda: qwen3_5.gated_delta_update,
    ),
    "convolution": (
        lambda: replaced_recurrence([], call_original, call_original, lambda _: None),
        lambda: nn.Conv1d.__call__,
    ),
    "calls": (lambda: wrapped_calls([nn.Linear], call_original), lambda: nn.Linear.__call__),
    "layers": (lambda: recorded_layers(ENCODER, "layers", []), lambda: ENCODER.layers),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_call_the_rope_that_is_replaced(family: str) -> None:
    plain, same = logits(family), logits(family, rope_at([*range(TOKENS)], 0))
    assert mx.allclose(plain, same, atol=1e-4)
    assert not mx.allclose(plain, logits(family, rope_at([*range(0, 5 * TOKENS, 5)], 0)), atol=1e-4)


def test_replaced_rope_refuses_other_tokens_than_its_own() -> None:
    with pytest.raises(UnsupportedRope):
        logits("llama", rope_at([*range(TOKENS)], 1))
    with pytest.raises(UnsupportedRope):
        logits("llama", rope_at([*range(TOKENS - 1)], 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_models_call_the_attention_that_is_observed(family: str) -> None:
    seen = list[tuple[int, int]]()

    def observe(q: mx.array, k: mx.array, v: mx.array, *, scale: float, **named: Any) -> None:
        seen.append((q.shape[2], k.shape[2]))

    assert mx.array_equal(logits(family, observed_attention(observe)), logits(family))
    assert set(seen) == {(TOKENS, TOKENS)}


@pytest.mark.parametrize("family", CONFIGS)
def test_vision_encoders_call_the_layers_that_are_recorded(family: str) -> None:
    vision, outputs = cases.model(family).vision, list[mx.array]()
    assert vision is not None
    config = vision.network.config.vision_config
    vision.family.encode(cases.processed(family, 1, 32, 32).pixel_inputs, outputs)
    assert len(outputs) == (getattr(config, "depth", None) or config.num_hidden_layers)


@pytest.mark.parametrize("name", HOOKS)
def test_original_is_restored_after_success_and_failure(name: str) -> None:
    opened, current = HOOKS[name]
    original = current()
    with opened():
        assert current() is not original
    assert current() is original
    with pytest.raises(ZeroDivisionError), opened():
        raise ZeroDivisionError
    assert current() is original


@pytest.mark.parametrize("inner", HOOKS)
@pytest.mark.parametrize("outer", HOOKS)
def test_second_hook_is_refused_and_leaves_the_first_open(outer: str, inner: str) -> None:
    opened, current = HOOKS[outer]
    original = current()
    with opened():
        replaced = current()
        with pytest.raises(RuntimeError, match="one hook at a time"), HOOKS[inner][0]():
            raise AssertionError("two hooks are open")
        assert current() is replaced
        with ThreadPoolExecutor() as threads, pytest.raises(RuntimeError, match="one hook at a time"):
            threads.submit(HOOKS[inner][0]().__enter__).result()
    assert current() is original
    with HOOKS[inner][0]():
        pass


@pytest.mark.parametrize("name", ["rope", "scaled_dot_product_attention"])
def test_other_threads_get_the_original_function(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = list[str]()
    monkeypatch.setattr(mx.fast, name, lambda *_, **__: "original")
    hook = rope_at([4], 0) if name == "rope" else observed_attention(lambda *given, **_: calls.append(given[0]))
    with hook, ThreadPoolExecutor() as threads:
        assert threads.submit(getattr(mx.fast, name), "other", 8, offset=9).result() == "original"
        assert not calls
        with pytest.raises(AttributeError) if name == "rope" else nullcontext():
            getattr(mx.fast, name)("own", 8, offset=0)
    assert calls == ([] if name == "rope" else ["own"])
