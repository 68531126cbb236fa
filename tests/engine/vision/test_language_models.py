"""Text of families that only mlx-vlm has: rows equal its own path for a single request, or the family is refused."""

import importlib.util
import inspect
import json
import re
import sys
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from mlx_vlm.generate.ar import generate_step
from mlx_vlm.utils import load_model

from tests.engine.driver import Run
from tests.engine.tiny import CONFIGS, EOS, ONLY_MLX_VLM, prompt, write_checkpoint
from worker.engine.model import load as opening
from worker.engine.model.check import check_model
from worker.engine.model.load import open_model
from worker.engine.vision.load import _ALONE, _TEXT_THROUGH_MLX_VLM, built_by_mlx_vlm
from worker.errors import CannotStart

LENGTHS = 3, 50, 17, 130, 24


def by_mlx_vlm(folder: Path, tokens: tuple[int, ...], max_tokens: int) -> list[int]:
    """Return the greedy answer of mlx-vlm's single-request path."""
    answer = list[int]()
    for token, _ in generate_step(mx.array([tokens]), load_model(folder), None, None, max_tokens=max_tokens):
        if int(token) == EOS:
            break
        answer.append(int(token))
    return answer


@pytest.mark.parametrize("family", ONLY_MLX_VLM)
def test_rows_of_a_batch_equal_the_answers_of_mlx_vlm_alone(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(ONLY_MLX_VLM[family], tmp_path)
    model = open_model(str(folder))
    run = Run(model)
    for seed, length in enumerate(LENGTHS):
        run.add(str(seed), prompt(length, seed), max_tokens=12 + 3 * seed)
        run.step()
    expected = {
        str(seed): by_mlx_vlm(folder, prompt(length, seed), 12 + 3 * seed) for seed, length in enumerate(LENGTHS)
    }
    assert run.drain() == expected
    assert len({token for answer in expected.values() for token in answer}) > 10
    assert "mlx-vlm" in model.cache_fingerprint


@pytest.mark.parametrize("family", ["k2_horizon", "step3p7"])
def test_rows_of_a_quantized_checkpoint_equal_the_answers_of_mlx_vlm_alone(family: str, tmp_path: Path) -> None:
    config = {**ONLY_MLX_VLM[family], "quantization": {"group_size": 32, "bits": 4}}
    whole = ONLY_MLX_VLM[family].get("text_config", ONLY_MLX_VLM[family])
    widths = {**whole, "hidden_size": 64}
    config |= {"text_config": widths} if "text_config" in config else widths
    mx.random.seed(3)
    vlm = built_by_mlx_vlm(config)
    nn.quantize(vlm, 32, 4, class_predicate=is_of_text)
    folder = write_checkpoint(ONLY_MLX_VLM[family], tmp_path)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(vlm.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    model, report = open_model(str(folder)), check_model(str(folder), memory=10**12)
    assert (report.bits, report.costs.weights_bytes) == (4, model.costs.weights_bytes)
    run = Run(model)
    for seed, length in enumerate(LENGTHS):
        run.add(str(seed), prompt(length, seed), max_tokens=12)
    assert run.drain() == {
        str(seed): by_mlx_vlm(folder, prompt(length, seed), 12) for seed, length in enumerate(LENGTHS)
    }


def is_of_text(path: str, layer: nn.Module) -> bool:
    return "language_model" in path and hasattr(layer, "to_quantized")


@pytest.mark.parametrize("family", ONLY_MLX_VLM)
def test_a_report_without_weights_equals_that_of_the_checkpoint(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint({**ONLY_MLX_VLM[family], "dtype": "float32"}, tmp_path)
    here = check_model(str(folder), memory=10**12)
    assert here.blockers == ()
    assert here.context == 2048
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(opening, "download", lambda name, allow_patterns: folder)
    there = check_model("someone/some-model", memory=10**12)
    assert (there.profile, there.costs, there.drafting) == (here.profile, here.costs, here.drafting)


def test_each_family_that_is_served_is_tested_and_missing_in_mlx_lm() -> None:
    assert {*ONLY_MLX_VLM} == {*_TEXT_THROUGH_MLX_VLM}
    for family in (*_TEXT_THROUGH_MLX_VLM, *_ALONE):
        assert importlib.util.find_spec(f"mlx_vlm.models.{family}")
        with pytest.raises(ValueError, match="not supported"):
            _get_classes({"model_type": family})


@pytest.mark.parametrize("family", [name for name, reason in _ALONE.items() if "(" in reason])
def test_a_cache_that_is_named_as_the_reason_is_the_family_s(family: str) -> None:
    cache = _ALONE[family].partition("(")[2].partition(")")[0]
    module = import_module(f"mlx_vlm.models.{family}.{family}")
    assert cache in inspect.getsource(import_module(module.LanguageModel.__module__))


@pytest.mark.parametrize(
    ("family", "reason"),
    [(family, reason) for family, reason in _ALONE.items()] + [("mllama", "no test compares its rows in a batch")],
)
def test_another_family_is_refused_by_name_with_the_reason(family: str, reason: str, tmp_path: Path) -> None:
    folder = write_checkpoint(CONFIGS["qwen3"], tmp_path)
    (folder / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], "model_type": family}))
    for use in (lambda: check_model(str(folder), memory=10**12), lambda: open_model(str(folder))):
        with pytest.raises(CannotStart) as refused:
            use()
        assert f"Only mlx-vlm has models of type {family}, and {reason}" in str(refused.value)


@pytest.mark.parametrize("family", ["k2_horizon", "deepseek_v4"])
def test_without_mlx_vlm_the_way_out_or_the_reason_is_told(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(CONFIGS["qwen3"], tmp_path)
    (folder / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], "model_type": family}))
    monkeypatch.delitem(sys.modules, "worker.engine.upstream.mlx_vlm", raising=False)
    monkeypatch.delattr("worker.engine.upstream.mlx_vlm", raising=False)
    monkeypatch.setitem(sys.modules, "mlx_vlm.utils", None)
    with pytest.raises(CannotStart, match=re.escape(_ALONE.get(family, "pip install 'mlx-vlm>="))):
        check_model(str(folder), memory=10**12)
