"""MTP heads are found in the folders of their models, and loaded, and compute what their layouts describe."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from tests.engine.speculation.mtp.checkpoints import (
    MTP_CONFIGS,
    ReferenceHead,
    head_tensors,
    write_head_alone,
    write_with_head,
)
from tests.engine.tiny import prompt, write_checkpoint
from worker.engine.speculation.mtp import MTPHead, Trunk
from worker.engine.speculation.mtp_load import (
    HeadReport,
    files_to_download,
    find_head,
    load_head,
    refuse_other_model,
    report_head,
)
from worker.engine.upstream.mlx_lm import load_model
from worker.errors import CannotStart

LAYOUTS = [*MTP_CONFIGS]
NAME = "SLUICE_MTP_MODEL=folder"


def network_of(name: str, tmp_path: Path) -> nn.Module:
    network, _ = load_model(write_checkpoint(MTP_CONFIGS[name], tmp_path / "trunk"))
    return network


def loaded(network: nn.Module, folder: Path, config: dict[str, Any]) -> MTPHead:
    found = find_head(folder, config)
    assert found is not None
    return load_head(network, found, config, name=NAME)


def states(head: MTPHead, network: nn.Module, tokens: list[int]) -> mx.array:
    trunk = Trunk(network)
    hidden = trunk.hidden(mx.array([tokens[:-1]]))
    return head(head.embed(mx.array([tokens[1:]]), trunk), hidden)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_head_computes_what_its_layout_describes(name: str, tmp_path: Path) -> None:
    network = network_of(name, tmp_path)
    folder, tokens = write_with_head(name, tmp_path / "both"), list(prompt(23, 1))
    head, trunk = loaded(network, folder, MTP_CONFIGS[name]), Trunk(network)
    reference = ReferenceHead(name, head_tensors(name), trunk.embed(mx.arange(1024)), output_of(network))
    expected = reference.hidden(tokens[1:], trunk.hidden(mx.array([tokens[:-1]]))[0])
    assert mx.allclose(states(head, network, tokens), expected, atol=2e-4, rtol=1e-4).item()


def output_of(network: Any) -> mx.array:
    text: Any = getattr(network, "language_model", network)
    output: mx.array = text.lm_head.weight
    return output


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_of_a_trunk_compute_what_the_whole_does(name: str, tmp_path: Path) -> None:
    network, tokens = network_of(name, tmp_path), mx.array([prompt(9, 1)])
    trunk = Trunk(network)
    assert mx.array_equal(trunk.logits(trunk.hidden(tokens)), network(tokens)).item()


def test_a_trunk_with_tied_embeddings_uses_them_as_its_output_head(tmp_path: Path) -> None:
    config = MTP_CONFIGS["qwen3_5"]
    tied = {
        **config,
        "tie_word_embeddings": True,
        "text_config": {**config["text_config"], "tie_word_embeddings": True},
    }
    network, _ = load_model(write_checkpoint(tied, tmp_path))
    trunk, tokens = Trunk(network), mx.array([prompt(9, 1)])
    assert mx.array_equal(trunk.logits(trunk.hidden(tokens)), network(tokens)).item()


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("qwen3_5", {"model.language_model.layers.0.linear_attn.conv1d.weight": (64, 1, 4)}),
        ("qwen3_next", {"model.layers.0.mlp.experts.0.up_proj.weight": (32, 64)}),
    ],
)
def test_norms_kept_minus_one_become_whole_as_those_of_the_trunk_do(
    name: str, raw: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    network, whole = network_of(name, tmp_path), head_tensors(name)
    original = {key: value - 1 if "norm" in key else value for key, value in whole.items()}
    original |= {key: mx.zeros(shape) for key, shape in raw.items()}
    head = loaded(network, write_head_alone(name, tmp_path / "original", original), MTP_CONFIGS[name])
    expected = loaded(network, write_head_alone(name, tmp_path / "whole", whole), MTP_CONFIGS[name])
    for (path, ours), (_, theirs) in zip(
        tree_flatten(head.parameters()), tree_flatten(expected.parameters()), strict=True
    ):
        assert mx.allclose(ours, theirs, atol=1e-6).item(), path


def test_a_quantized_head_stays_quantized_as_its_config_says(tmp_path: Path) -> None:
    network, tensors = network_of("qwen3_5", tmp_path), head_tensors("qwen3_5")
    own_bits = {"mtp.fc": 8}
    stored = dict(tensors)
    for name in [name for name, value in tensors.items() if value.ndim == 2]:
        path = name.removesuffix(".weight")
        weight, scales, biases = mx.quantize(stored.pop(name), group_size=32, bits=own_bits.get(path, 4))
        stored |= {f"{path}.weight": weight, f"{path}.scales": scales, f"{path}.biases": biases}
    quantization = {"group_size": 32, "bits": 4, "mtp.fc": {"group_size": 32, "bits": 8}}
    folder = write_head_alone("qwen3_5", tmp_path / "quantized", stored, quantization=quantization)
    head = loaded(network, folder, {**MTP_CONFIGS["qwen3_5"], "quantization": quantization})
    assert (head.fc.bits, head.layers[0].mlp.up_proj.bits) == (8, 4)
    tokens = list(prompt(23, 1))
    whole = loaded(network, write_head_alone("qwen3_5", tmp_path / "whole", tensors), MTP_CONFIGS["qwen3_5"])
    ours, theirs = states(head, network, tokens), states(whole, network, tokens)
    difference = mx.linalg.norm(ours - theirs) / mx.linalg.norm(theirs)
    assert 0.001 < difference.item() < 0.5


def test_a_head_takes_the_dtype_of_the_trunk_but_a_router_s_bias_does_not(tmp_path: Path) -> None:
    network = network_of("glm4_moe", tmp_path)
    network.set_dtype(mx.bfloat16)
    head = loaded(network, write_with_head("glm4_moe", tmp_path / "both"), MTP_CONFIGS["glm4_moe"])
    dtypes = {path: value.dtype for path, value in tree_flatten(head.parameters())}
    assert dtypes.pop("layers.0.mlp.gate.e_score_correction_bias") == mx.float32
    assert set(dtypes.values()) == {mx.bfloat16}


def test_a_glm_head_without_its_own_vocabulary_shares_the_trunk_s(tmp_path: Path) -> None:
    network = network_of("glm4_moe", tmp_path)
    shared = {k: v for k, v in head_tensors("glm4_moe").items() if "embed_tokens" not in k and "head.head" not in k}
    head = loaded(network, write_head_alone("glm4_moe", tmp_path / "h", shared), MTP_CONFIGS["glm4_moe"])
    trunk, tokens = Trunk(network), mx.array([prompt(9, 1)])
    assert mx.array_equal(head.embed(tokens, trunk), trunk.embed(tokens)).item()
    assert mx.array_equal(head.logits(trunk.hidden(tokens), trunk), network(tokens)).item()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_without_a_head_has_none(name: str, tmp_path: Path) -> None:
    assert find_head(write_checkpoint(MTP_CONFIGS[name], tmp_path), MTP_CONFIGS[name]) is None


# Heads that cannot be loaded


def refused(tmp_path: Path, name: str, tensors: dict[str, mx.array]) -> str:
    network = network_of(name, tmp_path)
    with pytest.raises(CannotStart) as error:
        loaded(network, write_head_alone(name, tmp_path / "head", tensors), MTP_CONFIGS[name])
    return str(error.value)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = {key: value for key, value in head_tensors(name).items() if "o_proj" not in key}
    message = refused(tmp_path, name, tensors)
    assert (
        message
        == f"{NAME}: its MTP head is incomplete, without layers.0.self_attn.o_proj.weight; fetch all of its files."
    )


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = {**head_tensors("qwen3_5"), "mtp.fc.weight": mx.zeros((64, 64))}
    message = refused(tmp_path, "qwen3_5", tensors)
    assert message == f"{NAME}: fc.weight of its MTP head has the shape (64, 64), and config.json says (64, 128)."


def test_a_missing_expert_is_an_error(tmp_path: Path) -> None:
    tensors = {key: value for key, value in head_tensors("qwen3_next").items() if "experts.2.up_proj" not in key}
    assert "(3, 32, 64)" in refused(tmp_path, "qwen3_next", tensors)


def test_tensors_that_the_layout_does_not_have_are_named(tmp_path: Path) -> None:
    tensors = {**head_tensors("qwen3_5"), "mtp.fc.weight_scale_inv": mx.zeros((1, 1))}
    assert "fc.weight_scale_inv" in refused(tmp_path, "qwen3_5", tensors)


def test_a_head_of_two_layers_is_refused(tmp_path: Path) -> None:
    tensors = head_tensors("qwen3_5")
    more = {key.replace("layers.0", "layers.1"): value for key, value in tensors.items() if "layers.0" in key}
    assert "2 layers" in refused(tmp_path, "qwen3_5", tensors | more)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = write_head_alone("qwen3_5", tmp_path, head_tensors("qwen3_5"))
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        find_head(folder, MTP_CONFIGS["qwen3_5"])


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "mtp.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    assert find_head(tmp_path, MTP_CONFIGS["qwen3_5"]) is None


def test_the_head_of_another_model_is_refused() -> None:
    ours = MTP_CONFIGS["qwen3_5"]
    theirs = {**ours, "text_config": {**ours["text_config"], "hidden_size": 128}}
    refuse_other_model(ours, ours, name=NAME)
    with pytest.raises(CannotStart, match="hidden_size is 128, and the served model has 64"):
        refuse_other_model(theirs, ours, name=NAME)


# Downloads


def test_only_the_files_with_the_head_and_one_that_decides_the_norms_are_downloaded() -> None:
    weight_map = {
        "model.language_model.layers.0.linear_attn.conv1d.weight": "model-1.safetensors",
        "model.language_model.layers.4.linear_attn.conv1d.weight": "model-2.safetensors",
        "model.language_model.norm.weight": "model-3.safetensors",
        "mtp.fc.weight": "model-4.safetensors",
    }
    files = files_to_download({"weight_map": weight_map}, MTP_CONFIGS["qwen3_5"])
    assert files == ["model-1.safetensors", "model-4.safetensors"]


def test_nothing_is_downloaded_of_a_model_without_a_head() -> None:
    weight_map = {"model.language_model.layers.0.linear_attn.conv1d.weight": "model-1.safetensors"}
    assert files_to_download({"weight_map": weight_map}, MTP_CONFIGS["qwen3_5"]) == []


def test_a_head_of_a_layout_that_is_not_loaded_is_reported_by_its_family() -> None:
    report = report_head({"model_type": "mimo", "num_hidden_layers": 2}, ["model.mtp_layers.0.input_proj.weight"])
    assert report == HeadReport("unsupported", "mimo: heads of this layout are not loaded")
