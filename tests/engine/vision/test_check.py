"""The report of `check` on images: if a worker would serve them, and else why not."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from models.tiny_vision import CONFIGS, write_checkpoint
from tests.engine.vision import cases
from worker.engine.model import check as checking
from worker.engine.model import load as opening
from worker.engine.model.check import ModelReport
from worker.engine.model.profile import weights_bytes


def check(folder: Path | str, **how: Any) -> ModelReport:
    return checking.check_model(str(folder), memory=10**12, **how)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint("mistral3", tmp_path)


@pytest.mark.parametrize("family", CONFIGS)
def test_report_counts_the_encoders_weights_as_a_worker_does(family: str, tmp_path: Path) -> None:
    told, model = check(write_checkpoint(family, tmp_path)), cases.model(family)
    assert (told.vision_unsupported_reason, told.blockers) == (None, ())
    assert told.costs.weights_bytes == model.costs.weights_bytes
    assert told.encoder_bytes == model.costs.weights_bytes - weights_bytes(model.network)


def test_checking_a_vision_model_reads_no_weights(tmp_path: Path) -> None:
    folder = write_checkpoint("mistral3", tmp_path, text={"intermediate_size": 2048})
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert check(folder).costs.weights_bytes > 5_000_000
    assert mx.get_peak_memory() - before < 100_000


def test_a_family_whose_images_are_not_served_is_named(folder: Path) -> None:
    rewrite(folder / "config.json", model_type="llava")
    text_alone(check(folder), "Models of type llava are served for text only.")


def test_conversion_without_encoder_weights_is_reported_as_text_only(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    kept = {name: array for name, array in weights.items() if name.startswith("language_model.")}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, metadata={"format": "mlx"})
    text_alone(check(folder), "It is served for text only: the weights of its vision encoder are missing")


def test_report_names_the_setting_that_disables_images(folder: Path) -> None:
    text_alone(check(folder, vision=False), "SLUICE_VISION is off.")


def text_alone(told: ModelReport, why: str) -> None:
    assert told.vision_unsupported_reason is not None
    assert why in told.vision_unsupported_reason
    assert told.blockers == ()
    assert told.encoder_bytes == 0
    assert told.costs.weights_bytes == weights_bytes(cases.model("mistral3").network)


@pytest.mark.parametrize("here", [True, False], ids=["here", "on the hub"])
def test_a_worker_without_mlx_vlm_would_not_start(folder: Path, here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "worker.engine.upstream.mlx_vlm", raising=False)
    monkeypatch.delattr("worker.engine.upstream.mlx_vlm", raising=False)
    monkeypatch.setitem(sys.modules, "mlx_vlm.utils", None)
    told = check(folder) if here else hub_has(folder, monkeypatch)
    assert told.vision_unsupported_reason is not None
    assert "pip install 'mlx-vlm>=" in told.vision_unsupported_reason
    assert told.blockers == (told.vision_unsupported_reason,)


def test_a_worker_that_cannot_prepare_images_would_not_start(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    told = check(folder)
    assert told.vision_unsupported_reason is not None
    assert "preprocessor_config.json" in told.vision_unsupported_reason
    assert told.blockers == (told.vision_unsupported_reason,)


def test_report_on_a_hub_model_uses_its_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = check(folder)
    index = folder / "model.safetensors.index.json"
    names = dict.fromkeys(mx.load(str(folder / "model.safetensors")), "model.safetensors")
    index.write_text(json.dumps({"metadata": {"total_size": here.costs.weights_bytes}, "weight_map": names}))
    rewrite(folder / "config.json", dtype="float32")
    there = hub_has(folder, monkeypatch)
    assert (there.vision_unsupported_reason, there.encoder_bytes, there.blockers) == (None, here.encoder_bytes, ())
    assert there.costs.weights_bytes == here.costs.weights_bytes
    index.write_text(json.dumps({"weight_map": {"language_model.model.norm.weight": "model.safetensors"}}))
    text_alone(
        hub_has(folder, monkeypatch), "It is served for text only: the weights of its vision encoder are missing"
    )


def test_without_an_index_the_hub_model_counts_as_vision_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = hub_has(folder, monkeypatch)
    assert (told.vision_unsupported_reason, told.encoder_bytes, told.blockers) == (None, 0, ())


def hub_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelReport:
    (folder / "model.safetensors").unlink(missing_ok=True)
    monkeypatch.setattr(opening, "download", lambda name, allow_patterns: folder)
    return check("someone/some-model")


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
