"""A served model has a fingerprint, and an unsuitable one is refused at start."""

import json
import shutil
from pathlib import Path

import pytest

from tests.engine.tiny import CANNOT_BATCH, CONFIGS, write_checkpoint
from tests.support.stack import TINY_CHAT
from worker.engine.model.check import check_model
from worker.engine.model.load import fingerprint, not_served, open_model
from worker.engine.upstream.hub import TransportError, hub_errors
from worker.errors import CannotStart


@pytest.mark.parametrize(("name", "reason"), [("llama4", "ChunkedKVCache"), ("dynamic_ntk", "Dynamic-NTK")])
def test_a_model_that_cannot_batch_is_refused_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    folder = write_checkpoint(CANNOT_BATCH[name], tmp_path)
    with pytest.raises(CannotStart, match=reason):
        open_model(str(folder))


def test_missing_folder_is_refused_by_name() -> None:
    with pytest.raises(CannotStart, match="./no/such/folder: there is no such folder"):
        open_model("./no/such/folder")


@pytest.mark.parametrize("given", ["./tiny-chta", "sub/../tiny-chta", "tiny-chta/"])
def test_misspelt_folder_is_refused_with_a_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    for name in ("tiny-chat", "other", "sub"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotStart) as refused:
        open_model(given)
    assert str(refused.value).startswith(f"SLUICE_MODEL={given}: there is no such folder; did you mean ")
    assert str(refused.value).endswith("tiny-chat?")


def test_unknown_hub_id_is_refused_with_a_suggested_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError("no such repository")

    monkeypatch.setattr("worker.engine.model.load.download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny-chat").mkdir(parents=True)
    with pytest.raises(CannotStart, match=r"no such folder; did you mean models/tiny-chat\?$"):
        open_model("models/tiny-chta")
    with pytest.raises(CannotStart, match="is not a local folder, and could not be downloaded: no such repository"):
        open_model("mlx-community/unheard-of")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (hub_errors.RepositoryNotFoundError, "Hugging Face has no such public model; check the name."),
        (hub_errors.GatedRepoError, "Hugging Face asks for a login that may read it: run hf auth login."),
        (hub_errors.HFValidationError, "no id of Hugging Face, such as mlx-community/Qwen3-4B-4bit; check the name."),
        (
            hub_errors.LocalEntryNotFoundError,
            "Hugging Face cannot be reached from here; check the name, or give a folder.",
        ),
        (
            TransportError,
            "the connection to Hugging Face broke (theirs); try again: the files that have arrived are kept.",
        ),
    ],
)
def test_why_a_hub_id_is_not_downloaded_is_told_in_our_words(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], said: str
) -> None:
    def download(*_: object, **__: object) -> str:
        raise error.__new__(error, "theirs")

    monkeypatch.setattr("worker.engine.model.load.download", download)
    with pytest.raises(CannotStart) as refused:
        open_model("mlx-community/unheard-of")
    assert str(refused.value) == f"SLUICE_MODEL=mlx-community/unheard-of is not a local folder, and {said}"


def test_a_file_in_place_of_a_folder_is_refused() -> None:
    with pytest.raises(CannotStart, match="is a file"):
        open_model(str(TINY_CHAT / "config.json"))


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(CONFIGS["qwen3"], tmp_path)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:500])
    with pytest.raises(CannotStart, match="cannot load"):
        open_model(str(folder))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(CONFIGS["qwen3"], tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CannotStart, match="has no weights"):
        open_model(str(folder))


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_checkpoint(CONFIGS["qwen3"], tmp_path)
    (folder / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], "model_type": "nosuchmodel"}))
    with pytest.raises(CannotStart, match="nosuchmodel"):
        open_model(str(folder))


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(CONFIGS["qwen3"], tmp_path)
    (folder / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], "hidden_size": 128}))
    with pytest.raises(CannotStart, match="cannot load"):
        open_model(str(folder))


def drop_template(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def no_weights_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr("worker.engine.model.load._measured", read)


@pytest.mark.usefixtures("no_weights_read")
def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    drop_template(folder := write_checkpoint(CONFIGS["qwen3"], tmp_path))
    with pytest.raises(CannotStart, match="chat template"):
        open_model(str(folder))


def test_a_chat_template_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    drop_template(folder := write_checkpoint(CONFIGS["qwen3"], tmp_path))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert open_model(str(folder)).tokenizer.has_chat_template


@pytest.mark.usefixtures("no_weights_read")
@pytest.mark.parametrize("problem", ["too large", "no template", "no batch"])
def test_what_sluice_check_refuses_is_refused_with_its_sentence_before_weights_are_read(
    tmp_path: Path, problem: str
) -> None:
    folder = write_checkpoint(CANNOT_BATCH["llama4"] if problem == "no batch" else CONFIGS["qwen3"], tmp_path)
    if problem == "no template":
        drop_template(folder)
    memory = 900_000 if problem == "too large" else 10**9
    reasons = check_model(str(folder), memory=memory).blockers
    assert len(reasons) == 1
    with pytest.raises(CannotStart) as refused:
        open_model(str(folder), memory=memory)
    assert str(refused.value) == str(not_served(str(folder), reasons))


def test_a_model_that_just_fits_is_opened(tmp_path: Path) -> None:
    folder = write_checkpoint(CONFIGS["qwen3"], tmp_path)
    costs = check_model(str(folder), memory=10**9).costs
    least = next(memory for memory in range(900_000, 10**8, 100_000) if costs.max_tokens(memory))
    assert check_model(str(folder), memory=least).blockers == ()
    assert open_model(str(folder), memory=least).costs.weights_bytes == costs.weights_bytes


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    folder = write_checkpoint(CONFIGS["qwen3"], tmp_path)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (folder / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], "model_file": "evil.py"}))
    with pytest.raises(CannotStart, match=r"evil\.py"):
        open_model(str(folder))
    assert not (tmp_path / "ran").exists()


def test_a_fingerprint_changes_with_a_further_template(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_CHAT, tmp_path / "copy")
    seen = {fingerprint(folder)}
    (folder / "additional_chat_templates").mkdir()
    for name, text in (("tool_use", "a"), ("tool_use", "b"), ("rag", "b")):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
        seen.add(fingerprint(folder))
    assert len(seen) == 4


@pytest.mark.parametrize("changed", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_a_fingerprint_changes_with_any_part_of_the_model(tmp_path: Path, changed: str) -> None:
    folder = shutil.copytree(TINY_CHAT, tmp_path / "copy")
    assert fingerprint(folder) == fingerprint(TINY_CHAT)
    content = bytearray((folder / changed).read_bytes())
    content[-2] ^= 1
    (folder / changed).write_bytes(content)
    assert fingerprint(folder) != fingerprint(TINY_CHAT)


def test_code_of_a_checkpoint_runs_only_if_trusted(tmp_path: Path) -> None:
    folder, ran = write_checkpoint(CONFIGS["qwen3"], tmp_path), tmp_path / "ran"
    (folder / "own.py").write_text(f"from mlx_lm.models.qwen3 import *\nopen({str(ran)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "own.py"}))
    with pytest.raises(CannotStart, match=r"config\.json names Python code .*own.py.*SLUICE_TRUST_MODEL_CODE"):
        open_model(str(folder))
    assert not ran.exists()
    assert open_model(str(folder), trusted=True).vocab > 0
    assert ran.exists()
