"""Every name, signature and behaviour of mlx-lm that we borrow. When an upgrade fails, it fails here first."""

import inspect
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.tiny import CONFIGS, prompt, write_checkpoint
from tests.support.stack import TINY_CHAT
from worker.engine.upstream import mlx_lm


def parameters(callable_: Any) -> list[str]:
    return list(inspect.signature(callable_).parameters)


def test_the_version_is_the_one_that_these_tests_were_written_against() -> None:
    assert version("mlx-lm") == "0.32.2"


def test_the_loaders_take_what_we_give_them() -> None:
    assert parameters(mlx_lm.load_model)[:1] == ["model_path"]
    assert parameters(mlx_lm.load_tokenizer) == ["model_path", "tokenizer_config_extra", "eos_token_ids"]
    assert parameters(mlx_lm.download)[:1] == ["path_or_hf_repo"]
    assert parameters(mlx_lm.make_prompt_cache)[:1] == ["model"]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return mlx_lm.load_model(write_checkpoint(CONFIGS["qwen3_5"], tmp_path_factory.mktemp("m")))[0]


def prefilled(network: Any, tokens: int) -> list[Any]:
    cache = mlx_lm.make_prompt_cache(network)
    network(mx.array([prompt(tokens, 1)]), cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


def test_a_row_s_keys_and_values_are_as_long_as_its_offset_says(network: Any) -> None:
    kept = next(layer for layer in prefilled(network, 9) if isinstance(layer, mlx_lm.KVCache))
    keys, values = kept.keys_and_values()
    assert (kept.offset, keys.shape[2], values.shape[2]) == (9, 9, 9)


def test_a_recurrent_layer_of_one_row_has_no_padding_to_carry(network: Any) -> None:
    """In a batch made by upstream's `merge` it has, and updates it at every step without anybody reading it."""
    recurrent = next(layer for layer in prefilled(network, 9) if isinstance(layer, mlx_lm.ArraysCache))
    assert all(state.shape[0] == 1 for state in recurrent.cache)
    assert (recurrent.left_padding, recurrent.lengths) == (None, None)
    recurrent.cache[0] = None
    assert recurrent.empty()


def test_rotating_cache_has_its_window_and_order() -> None:
    kept = mlx_lm.RotatingKVCache(4)
    for k in range(6):
        kept.update_and_fetch(mx.full((1, 1, 1, 1), k), mx.full((1, 1, 1, 1), k))
    assert (kept.max_size, kept.keep, kept.offset) == (4, 0, 6)
    assert kept._temporal_order(kept.keys).flatten().tolist() == [2, 3, 4, 5]


def test_nested_caches_are_in_a_list() -> None:
    nested = mlx_lm.CacheList(mlx_lm.KVCache(), mlx_lm.KVCache())
    assert [type(layer) for layer in nested.caches] == [mlx_lm.KVCache] * 2


def test_tokenizer_wrapper_has_the_attributes_we_use(network: Any) -> None:
    wrapper = mlx_lm.TokenizerWrapper
    for name in (
        "detokenizer", "eos_token_ids", "apply_chat_template", "has_thinking", "think_start", "think_end",
        "has_tool_calling", "tool_call_start", "tool_call_end",
    ):  # fmt: skip
        assert name in vars(wrapper)
    loaded = mlx_lm.load_tokenizer(TINY_CHAT)
    assert {"_tokenizer", "_chat_template", "_thinking_kwarg"} <= set(vars(loaded))
    assert isinstance(loaded.detokenizer, mlx_lm.BPEStreamingDetokenizer)


def test_the_wrapper_switches_thinking_on_by_itself() -> None:
    """Which is why templates are rendered without it."""
    loaded = mlx_lm.load_tokenizer(TINY_CHAT)
    loaded._tokenizer.chat_template = "{{ enable_thinking }}"
    assert loaded.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "True"


def test_a_detokenizer_gives_each_text_once() -> None:
    detokenizer = mlx_lm.load_tokenizer(TINY_CHAT).detokenizer
    assert parameters(detokenizer.add_token) == ["token"]
    detokenizer.add_token(40)
    detokenizer.finalize()
    assert (detokenizer.last_segment != "", detokenizer.last_segment) == (True, "")
