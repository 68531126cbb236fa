"""The decoder layers of mlx-lm of which MTP heads are built: how they are made and called."""

import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.engine.speculation.mtp.checkpoints import MTP_CONFIGS
from tests.engine.tiny import prompt, write_checkpoint
from worker.engine.upstream import decoder_layers
from worker.engine.upstream.mlx_lm import KVCache, load_model

LAYERS = [
    (decoder_layers.Qwen35Layer, decoder_layers.Qwen35Args),
    (decoder_layers.Qwen3NextLayer, decoder_layers.Qwen3NextArgs),
    (decoder_layers.Glm4MoeLayer, decoder_layers.Glm4MoeArgs),
]


@pytest.mark.parametrize(("layer", "args"), LAYERS)
def test_a_layer_is_made_from_the_model_s_arguments_and_its_index(layer: Any, args: Any) -> None:
    assert [*inspect.signature(layer).parameters][1:] == ["layer_idx"]
    assert [*inspect.signature(layer.__call__).parameters] == ["self", "x", "mask", "cache"]
    assert callable(args.from_dict)


@pytest.mark.parametrize("args", [decoder_layers.Qwen35Args, decoder_layers.Qwen3NextArgs])
def test_a_qwen_layer_has_full_attention_if_its_index_ends_an_interval(args: Any) -> None:
    fields = inspect.signature(args).parameters
    assert "full_attention_interval" in fields


@pytest.mark.parametrize("name", [*MTP_CONFIGS])
def test_a_trunk_is_a_model_and_an_output_head(name: str, tmp_path: Any) -> None:
    network: Any = load_model(write_checkpoint(MTP_CONFIGS[name], tmp_path))[0]
    text = getattr(network, "language_model", network)
    assert isinstance(text.model.embed_tokens, nn.Embedding)
    assert "lm_head" in text
    hidden = text.model(mx.array([prompt(5, 1)]), None)
    assert hidden.shape == (1, 5, 64)


def test_an_attention_layer_writes_its_keys_to_its_cache() -> None:
    text = MTP_CONFIGS["qwen3_5"]["text_config"]
    layer = decoder_layers.Qwen35Layer(decoder_layers.Qwen35Args.from_dict({**text, "full_attention_interval": 1}), 0)
    cache = KVCache()
    layer(mx.zeros((1, 3, 64)), "causal", cache)
    assert (layer.is_linear, cache.offset) == (False, 3)
