"""Checkpoints as they are published, and as mlx-vlm converts them, are the same models."""

from math import isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.convert import convert

from models.tiny_vision import CONFIGS, write_checkpoint
from tests.engine.driver import answers, tokens
from tests.engine.vision import cases
from tests.engine.vision.cases import Prompt, prompt
from tests.engine.vision.published import publish
from worker.engine.model.load import Model, open_model

FAMILIES = [*CONFIGS]
LONG = 12

# Its positions are stretched, and queries grow with them.
_YARN = {"rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_MINISTRAL_3 = {
    "model_type": "ministral3",
    "rope_theta": None,
    "rope_parameters": {
        **_YARN,
        "type": "yarn",
        "rope_theta": 1e6,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16,
    },
}


def mixed(family: str) -> dict[str, Prompt]:
    return {
        "one": prompt(family, 5, (1, 24, 16), 29, seed=2),
        "two": prompt(family, 4, (2, 32, 16), 6, (3, 16, 16), 11, seed=3),
    }


def generated(model: Model, family: str) -> dict[str, list[int]]:
    outcomes = answers(model, [cases.image_request(family, id, each, LONG) for id, each in mixed(family).items()])
    return {id: tokens(each) for id, each in outcomes.items()}


def alone(model: Model, family: str) -> dict[str, list[int]]:
    return {id: cases.alone(family, each, LONG, by=model) for id, each in mixed(family).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_with_the_names_and_layouts_of_a_repository_is_the_same_model(family: str, tmp_path: Path) -> None:
    model = open_model(str(publish(family, tmp_path, seed=1)))
    assert model.vision is not None
    assert generated(model, family) == alone(cases.model(family), family)


# Of what has no multiple of 64 columns nothing is quantized then.
QUANTIZED = [
    *((family, 32) for family in FAMILIES),
    ("qwen3_5", 64),
    pytest.param("gemma4", 64, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "group"), QUANTIZED)
def test_rows_of_a_quantized_vision_model_equal_their_answers_alone(family: str, group: int, tmp_path: Path) -> None:
    published, folder = publish(family, tmp_path, seed=1), tmp_path / "quantized"
    convert(str(published), str(folder), quantize=True, q_group_size=group, q_bits=4)
    model = open_model(str(folder))
    assert model.vision is not None
    quantized = {path for path, layer in model.network.named_modules() if hasattr(layer, "bits")}
    assert "language_model.model.layers.0.mlp.up_proj" in quantized or family.endswith("_moe")
    assert not any(hasattr(layer, "bits") for layer in model.vision.network.vision_tower.modules())
    assert generated(model, family) == alone(model, family)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        *((family, {"tie_word_embeddings": True}) for family in FAMILIES if family.startswith(("qwen", "mistral"))),
        *((family, {"tie_word_embeddings": None}) for family in FAMILIES if family.startswith("qwen2")),
        ("mistral3", {"tie_word_embeddings": None}),
        ("pixtral", {"tie_word_embeddings": None}),
        ("pixtral", {"rope_theta": None}),
        ("gemma3", {"max_position_embeddings": None, "rms_norm_eps": None}),
        ("gemma4", {"rms_norm_eps": None, "tie_word_embeddings": None}),
        ("mistral3", _MINISTRAL_3),
    ],
)
@pytest.mark.slow
def test_text_model_reads_the_config_as_mlx_vlm_does(family: str, text: dict[str, Any], tmp_path: Path) -> None:
    model = open_model(str(write_checkpoint(family, tmp_path, seed=1, text=text)))
    assert generated(model, family) == alone(model, family)


# Without a GPU, MLX computes experts only in float32.
_DENSE = [family for family in FAMILIES if "experts" not in family and "_moe" not in family]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, mx.bfloat16) for family in _DENSE), pytest.param("gemma3", mx.float16, marks=pytest.mark.slow)],
    ids=str,
)
def test_half_precision_is_kept_and_finite(family: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    model = open_model(str(write_checkpoint(family, tmp_path, seed=1, dtype=dtype)))
    assert model.vision is not None
    prompt_image = cases.image_processor(family).preprocess(cases.image(1, 24, 16), b"")
    features = model.vision.family.encode(prompt_image.pixel_inputs, [])
    assert {array.dtype for array in features.arrays} == {dtype}
    assert all(mx.all(mx.isfinite(array)).item() for array in features.arrays)
    outcomes = answers(
        model, [cases.image_request(family, id, each, 4, top_logprobs=0) for id, each in mixed(family).items()]
    )
    assert all(isfinite(one.logprobs.token) for each in outcomes.values() for one in each if one.logprobs)
