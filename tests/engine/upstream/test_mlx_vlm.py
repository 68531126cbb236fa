"""Every name and signature of mlx-vlm that we borrow. When an upgrade fails, it fails here first."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from worker.engine.upstream import mlx_vlm


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        (mlx_vlm.load_model, ["model_path", "lazy", "kwargs"]),
        (mlx_vlm.load_processor, ["model_path", "add_detokenizer", "eos_token_ids", "kwargs"]),
        (mlx_vlm.get_model_and_args, ["config", "model_path"]),
        (mlx_vlm.get_model_type, ["config"]),
        (mlx_vlm.update_module_configs, ["model_config", "model_class", "config", "modules"]),
        (mlx_vlm.make_prompt_cache, ["model", "max_kv_size"]),
        (mlx_vlm.new_image, ["mode", "size", "color"]),
    ],
)
def test_a_borrowed_function_takes_what_it_took(call: Callable[..., Any], parameters: list[str]) -> None:
    assert list(inspect.signature(call).parameters) == parameters


def test_caches_hold_what_is_read_to_make_those_of_mlx_lm() -> None:
    assert (mlx_vlm.RotatingKVCache(max_size=8, keep=1).max_size, mlx_vlm.RotatingKVCache(max_size=8).keep) == (8, 0)
    assert len(mlx_vlm.ArraysCache(3).cache) == 3
    assert len(mlx_vlm.CacheList(mlx_vlm.KVCache(), mlx_vlm.KVCache()).caches) == 2
