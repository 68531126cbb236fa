"""A vision model's folder is recognized, loaded once, and refused if it would run code of its own."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from models.tiny_vision import CONFIGS, write_checkpoint
from tests.engine.driver import answer, tokens
from tests.engine.vision import cases
from worker.engine.model.load import fingerprint, open_model
from worker.engine.upstream import mlx_vlm
from worker.errors import CannotStart
from worker.request import GenerationRequest

FAMILIES = [*CONFIGS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint("qwen3_5", tmp_path / "model")


@pytest.mark.parametrize("family", FAMILIES)
def test_text_model_shares_the_arrays_of_the_vision_model(family: str) -> None:
    model = cases.model(family)
    assert model.vision is not None
    theirs = dict(tree_flatten(model.vision.network.parameters()))
    assert all(array is theirs[name] for name, array in tree_flatten(model.network.parameters()))
    assert model.costs.weights_bytes == sum({id(array): array.nbytes for array in theirs.values()}.values())


def test_a_model_is_in_memory_once(folder: Path) -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    model = open_model(str(folder))
    mx.clear_cache()
    assert mx.get_active_memory() - before < 1.1 * model.costs.weights_bytes


def test_quantized_vision_model_has_a_quantized_text_model(folder: Path) -> None:
    write_checkpoint("qwen3_vl", folder, bits=4)
    model = open_model(str(folder))
    layers = dict(model.network.named_modules())
    assert isinstance(layers["language_model.model.layers.0.mlp.up_proj"], nn.QuantizedLinear)
    assert model.vision is not None
    theirs = dict(tree_flatten(model.vision.network.parameters()))
    assert all(array is theirs[name] for name, array in tree_flatten(model.network.parameters()))


def test_audio_encoder_takes_no_memory() -> None:
    model = cases.model("gemma4")
    assert "audio_config" in CONFIGS["gemma4"]
    assert model.vision is not None
    assert not any("audio" in name for name, _ in tree_flatten(model.vision.network.parameters()))


def test_images_can_be_switched_off(folder: Path) -> None:
    model = open_model(str(folder), vision=False)
    assert model.vision is None
    assert model.costs.weights_bytes < cases.model("qwen3_5").costs.weights_bytes


def test_conversion_without_encoder_weights_is_served_for_text(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    kept = {name: array for name, array in weights.items() if name.startswith("language_model.")}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    assert open_model(str(folder)).vision is None


def test_unknown_vision_family_is_served_for_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint("mistral3", tmp_path, seed=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llava"}))  # mlx-lm takes it for a mistral3
    model = open_model(str(folder))
    assert model.vision is None
    assert "Models of type llava are served for text only." in caplog.text
    each = cases.prompt("mistral3", 20)
    outcomes = answer(model, GenerationRequest("text", each.tokens, 8))
    assert tokens(outcomes) == cases.alone("mistral3", each, 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_without_preprocessing_settings_is_refused(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path)
    (folder / "preprocessor_config.json").unlink(missing_ok=True)
    settings = folder / "processor_config.json"
    if settings.exists():
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "image_processor": None}))
    with pytest.raises(CannotStart, match=r"preprocessor_config\.json, or image_processor.*SLUICE_VISION=off"):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("family", "name", "settings"),
    [
        ("gemma3", "processor_config.json", {"image_seq_length": 256}),
        ("pixtral", "processor_config.json", {"patch_size": 8}),
    ],
)
def test_processor_with_another_token_count_than_the_model_is_refused(
    family: str, name: str, settings: dict[str, object], tmp_path: Path
) -> None:
    folder = write_checkpoint(family, tmp_path)
    (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **settings}))
    with pytest.raises(CannotStart, match=r"one image becomes \d+ tokens by the config and \d+ by the processor"):
        open_model(str(folder))


def test_a_model_that_the_two_libraries_read_differently_is_refused(tmp_path: Path) -> None:
    """mlx-vlm reads this setting under another name."""
    folder = write_checkpoint("gemma3", tmp_path, text={"rope_theta": 5e7})
    with pytest.raises(CannotStart, match=r"mlx-lm and mlx-vlm compute different logits .*SLUICE_VISION=off"):
        open_model(str(folder))


def test_model_with_different_caches_in_the_two_libraries_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = mlx_vlm.make_prompt_cache
    monkeypatch.setattr(mlx_vlm, "make_prompt_cache", lambda network: there(network)[::-1])
    generated = r"mlx-lm caches a layer as ArraysCache, mlx-vlm as KVCache.*SLUICE_VISION=off"
    with pytest.raises(CannotStart, match=generated):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("config.json", {"model_file": "evil.py"}),
        ("config.json", {"auto_map": {"AutoModel": "evil.Model"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}),
        ("preprocessor_config.json", {"auto_map": {"AutoProcessor": "evil.Processor"}}),
        ("processor_config.json", {"auto_map": {"AutoProcessor": "evil.Processor"}}),
    ],
)
def test_code_of_a_checkpoint_is_refused_by_name_and_not_run(folder: Path, name: str, code: dict[str, object]) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    generated = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps({**generated, **code}))
    with pytest.raises(CannotStart, match=rf"{name} names Python code .*evil.*SLUICE_TRUST_MODEL_CODE"):
        open_model(str(folder))
    assert not (folder / "ran").exists()


def test_code_of_a_checkpoint_runs_if_trusted(folder: Path) -> None:
    ran = folder / "ran"
    (folder / "own.py").write_text(f"from mlx_vlm.models.qwen3_5 import *\nopen({str(ran)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "own.py"}))
    assert open_model(str(folder), trusted=True).vision is not None
    assert ran.exists()


def test_error_without_mlx_vlm_names_the_alternatives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "worker.engine.upstream.mlx_vlm", raising=False)
    monkeypatch.delattr("worker.engine.upstream.mlx_vlm", raising=False)
    monkeypatch.setitem(sys.modules, "mlx_vlm.utils", None)
    with pytest.raises(CannotStart, match=r"pip install 'mlx-vlm>=.*SLUICE_VISION=off"):
        open_model(str(folder))
    assert open_model(str(folder), vision=False).vision is None


def test_text_alone_never_imports_mlx_vlm(folder: Path) -> None:
    program = (
        "import sys; from worker.engine.model.load import open_model; from worker.engine.engine import Engine;"
        "from worker.engine.options import EngineOptions;"
        f"Engine(open_model({str(folder)!r}, vision=False), EngineOptions(0.1));"
        "sys.exit(any(name.startswith('mlx_vlm') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("name", ["preprocessor_config.json", "chat_template.jinja"])
def test_a_fingerprint_changes_with_how_images_are_prepared(folder: Path, name: str) -> None:
    before = fingerprint(folder)
    (folder / name).write_text((folder / name).read_text() + " ")
    assert fingerprint(folder) != before
