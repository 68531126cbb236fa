"""The report of `check` on a model, and the models that it refuses."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.model.test_profile import ALL
from tests.engine.tiny import CANNOT_BATCH, CONFIGS, write_checkpoint
from tests.support.stack import TINY_CHAT
from worker.engine.model import check as checking
from worker.engine.model import load as opening
from worker.engine.model.check import ModelReport
from worker.engine.speculation.mtp_load import HeadReport
from worker.errors import CannotStart


def check(folder_or_hub_id: str, *, memory: int = 10**12) -> ModelReport:
    return checking.check_model(folder_or_hub_id, memory=memory)


def checkpoint(folder: Path, **more: Any) -> Path:
    """A small Qwen 3, with more in its config."""
    write_checkpoint(CONFIGS["qwen3"], folder)
    rewrite(folder / "config.json", **more)
    return folder


def rewrite(file: Path, **changes: Any) -> None:
    said = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in said.items() if value is not None}))


def test_report_on_the_tiny_model_is_complete() -> None:
    report = check(str(TINY_CHAT))
    assert Counter(layer.kind for layer in report.profile.layers) == {"recurrent": 2, "kv": 2}
    assert (report.costs.weights_bytes, report.profile.token_bytes, report.costs.state_bytes) == (
        2_047_296,
        1024,
        41_984,
    )
    assert (report.context, report.profile.vocab, report.bits, report.mtp.kind) == (32_768, 1024, None, "qwen3_5")
    assert (report.vision_unsupported_reason, report.encoder_bytes) == ("Its config has no vision encoder.", 0)
    assert report.tokenizer.think == ("<think>", "</think>")
    assert report.batches
    assert report.blockers == ()


def test_checking_takes_no_memory_for_the_weights(tmp_path: Path) -> None:
    folder = write_checkpoint({**CONFIGS["qwen3"], "hidden_size": 512}, tmp_path)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert check(str(folder)).costs.weights_bytes > 5_000_000
    assert mx.get_peak_memory() - before < 100_000


@pytest.mark.parametrize(("name", "reason"), [("llama4", "in chunks"), ("dynamic_ntk", "Dynamic-NTK")])
def test_model_that_cannot_batch_is_still_reported(tmp_path: Path, name: str, reason: str) -> None:
    report = check(str(write_checkpoint(CANNOT_BATCH[name], tmp_path)))
    assert not report.batches
    assert [reason in complaint for complaint in report.blockers] == [True]


def test_model_without_a_chat_template_is_blocked(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    rewrite(folder / "tokenizer_config.json", chat_template=None)
    assert check(str(folder)).blockers == ("It has no chat template, so it cannot serve chat requests.",)


def test_model_too_large_for_a_worker_is_blocked() -> None:
    (complaint,) = check(str(TINY_CHAT), memory=2_100_000).blockers
    assert "Its weights take 2 MB of the 2.1 MB that a worker may use on" in complaint
    assert "which leaves too little for any answer" in complaint


def test_quantized_model_reports_its_bits_and_less_memory(tmp_path: Path) -> None:
    whole = check(str(checkpoint(tmp_path / "whole"))).costs.weights_bytes
    # As a hub would have it: the config alone.
    quantized = hub_has(tmp_path / "quantized", quantization={"group_size": 32, "bits": 4}, dtype="float32")
    assert (quantized.bits, whole / 8 < quantized.costs.weights_bytes < whole / 5) == (4, True)


def hub_has(folder: Path, **config: Any) -> ModelReport:
    checkpoint(folder, **config)
    (folder / "model.safetensors").unlink()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(opening, "download", lambda name, allow_patterns: folder)
        return check("someone/some-model")


def test_report_from_the_hubs_config_equals_that_from_weights(tmp_path: Path) -> None:
    folder = check(str(checkpoint(tmp_path / "here", dtype="float32")))
    assert replace(hub_has(tmp_path / "there", dtype="float32"), tokenizer=folder.tokenizer) == folder


def test_weights_without_a_dtype_in_the_config_count_two_bytes(tmp_path: Path) -> None:
    folder, there = check(str(checkpoint(tmp_path / "here"))), hub_has(tmp_path / "there")
    assert there.profile.token_bytes * 2 == folder.profile.token_bytes
    assert there.costs.weights_bytes * 2 == folder.costs.weights_bytes


def test_no_weights_are_downloaded_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> Path:
        downloads.append((name, allow_patterns))
        return checkpoint(tmp_path)

    monkeypatch.setattr(opening, "download", download)
    check("someone/some-model")
    ((name, patterns),) = downloads
    assert name == "someone/some-model"
    for file in ("model-00001-of-00002.safetensors", "modeling.py"):
        assert not any(Path(file).match(pattern) for pattern in patterns)


def with_mtp(folder: Path, name: str, tensor: str | None, **text: Any) -> HeadReport:
    """Return the report on a model with this setting in its config, and this tensor in its files."""
    config = {**ALL[name], **text}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **text}
    write_checkpoint(config, folder)
    if tensor:
        mx.save_safetensors(str(folder / "model-mtp.safetensors"), {tensor: mx.zeros((2, 2))})
    return check(str(folder)).mtp


@pytest.mark.parametrize(
    ("name", "tensor", "text", "mtp"),
    [
        ("qwen3_5", None, {}, HeadReport("no")),
        ("qwen3_5", None, {"mtp_num_hidden_layers": 0}, HeadReport("no")),
        ("qwen3_5", None, {"mtp_num_hidden_layers": 1}, HeadReport("without weights")),
        ("qwen3_5", "mtp.fc.weight", {"mtp_num_hidden_layers": 1}, HeadReport("yes", "qwen3_5")),
        (
            "deepseek_v3",
            "model.layers.61.eh_proj.weight",
            {"num_nextn_predict_layers": 1},
            HeadReport("unsupported", "deepseek_v3: its attention is latent (MLA), for which no head is loaded"),
        ),
    ],
)
def test_a_head_is_reported_by_its_layout_or_by_why_it_is_not_used(
    tmp_path: Path, name: str, tensor: str | None, text: dict[str, int], mtp: HeadReport
) -> None:
    assert with_mtp(tmp_path, name, tensor, **text) == mtp


@pytest.mark.parametrize("kept", [4, 500, 100_000])
def test_truncated_weights_are_refused(tmp_path: Path, kept: int) -> None:
    weights = checkpoint(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(CannotStart, match="cannot load"):
        check(str(tmp_path))


def test_git_lfs_pointer_is_refused(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"
    (checkpoint(tmp_path) / "model.safetensors").write_text(pointer)
    with pytest.raises(CannotStart, match="is not a safetensors file"):
        check(str(tmp_path))


def test_error_on_truncated_weights_names_both_sizes(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(CannotStart, match=r"model\.safetensors is truncated: 100 kB of 898\.8 kB"):
        check(str(tmp_path))


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="nosuchmodel"):
        check(str(checkpoint(tmp_path, model_type="nosuchmodel")))


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CannotStart, match=r"evil\.py"):
        check(str(checkpoint(tmp_path, model_file="evil.py")))
    assert not (tmp_path / "ran").exists()


def test_trusted_code_of_a_checkpoint_runs_as_in_a_worker(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from mlx_lm.models.qwen3 import *\n")
    folder = str(checkpoint(tmp_path, model_file="own.py"))
    with pytest.raises(CannotStart, match="SLUICE_TRUST_MODEL_CODE"):
        check(folder)
    assert checking.check_model(folder, memory=10**12, trusted=True).blockers == ()


@pytest.mark.parametrize(
    ("name", "said"),
    [("./no/such/folder", "there is no such folder"), (str(TINY_CHAT / "config.json"), "is a file, not a folder")],
)
def test_path_that_is_not_a_folder_is_refused(name: str, said: str) -> None:
    with pytest.raises(CannotStart, match=said):
        check(name)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    shutil.copyfile(TINY_CHAT / "config.json", tmp_path / "config.json")
    with pytest.raises(CannotStart, match="has no weights"):
        check(str(tmp_path))
