"""`sluice check` ends with a report or with one sentence, whatever a model's folder contains."""

import json
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_lm.models
import mlx_vlm.models
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.cli.errors import CliError
from tests.engine.tiny import CONFIGS, EVERY_FAMILY
from tests.selection import examples
from tests.support.stack import TINY_CHAT
from worker.cli.check import check
from worker.engine.checkpoint import read_config
from worker.engine.model import load as opening
from worker.engine.model.check import open_tokenizer
from worker.errors import CannotStart

PLAIN = {key: value for key, value in CONFIGS["qwen3"].items() if key != "model_type"}
PACKAGES = mlx_lm.models, mlx_vlm.models
MODEL_TYPES = sorted({each.name for package in PACKAGES for each in pkgutil.iter_modules(package.__path__)})
HUB_ID = "someone/some-model"
WRONG: list[Any] = [None, "text", "", [], [[]], {}, -1, 0, 1.5, True, 10**30, float("inf"), [None], {"a": []}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that the hub has, with the tokenizer of the tiny model and without weights."""
    with_tokenizer(made := tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(opening, "download", lambda name, allow_patterns: made)
        yield made


def with_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(TINY_CHAT / name, folder / name)


def said_of(folder: Path, config: Any) -> str | None:
    """Return the sentence of `sluice check`; None if it has reported. Any other exception is a traceback."""
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    try:
        check(HUB_ID)
    except CliError as error:
        said = str(error)
        assert said.startswith((HUB_ID, "mlx-lm cannot", "mlx-vlm cannot", str(folder)))
        assert "Traceback" not in said
        return said
    return None


@pytest.mark.parametrize("first", sorted({name[0] for name in MODEL_TYPES}))
def test_every_model_type_of_both_packages_ends_with_a_report_or_a_sentence(folder: Path, first: str) -> None:
    for name in (name for name in MODEL_TYPES if name.startswith(first)):
        text = {**PLAIN, "model_type": name, "num_hidden_layers": 2}
        said_of(folder, text)
        said_of(folder, {"model_type": name, "text_config": text, "vision_config": {"model_type": name}})


@settings(max_examples=examples(1500, by_default=120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_field_may_be_missing_or_of_another_kind(folder: Path, data: st.DataObject) -> None:
    config = json.loads(json.dumps(EVERY_FAMILY[data.draw(st.sampled_from(sorted(EVERY_FAMILY)))]))
    for _ in range(data.draw(st.integers(1, 2))):
        part = config
        while True:
            key = data.draw(st.sampled_from([*part, "max_position_embeddings", "eos_token_id", "quantization"]))
            if not (isinstance(part.get(key), dict) and part[key] and data.draw(st.booleans())):
                break
            part = part[key]
        if data.draw(st.booleans()):
            part.pop(key, None)
        else:
            part[key] = data.draw(st.sampled_from(WRONG))
    said_of(folder, config)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("", "config.json is not JSON"),
        ("{", "config.json is not JSON"),
        ("[" * 100_000, "config.json is not JSON"),
        ("null", "config.json: it must be an object"),
        ("[]", "config.json: it must be an object"),
        ({}, "config.json: model_type must be a text"),
        ({"model_type": ["qwen3"]}, "config.json: model_type must be a text"),
        ({**CONFIGS["qwen3_5"], "text_config": []}, "config.json: text_config must be an object"),
        ({**CONFIGS["qwen3"], "quantization": 4}, "config.json: quantization must be an object"),
        ({**CONFIGS["qwen3"], "quantization": {"bits": "4"}}, "bits and group_size of quantization"),
        ({**CONFIGS["qwen3"], "max_position_embeddings": "8k"}, "max_position_embeddings must be"),
        ({**CONFIGS["qwen3"], "eos_token_id": {}}, "eos_token_id must be"),
        ({**CONFIGS["qwen3"], "num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000"),
        ({**CONFIGS["qwen3"], "hidden_size": None}, "TypeError"),
        ({**CONFIGS["qwen3_5"], "text_config": None}, "a field of config.json may be missing or wrong"),
        ({**CONFIGS["gemma3"], "num_hidden_layers": 1}, "IndexError: list index out of range; a field of config.json"),
        ({**PLAIN, "model_type": "olmo"}, "a package that it needs is missing"),
    ],
)
def test_what_is_wrong_with_a_config_is_told(folder: Path, config: Any, why: str) -> None:
    assert why in (said_of(folder, config) or "")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "{", '{"model": {"type": "BPE", "vocab": {}}}', "\xff"])
def test_broken_files_beside_it_end_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    with_tokenizer(tmp_path)
    (tmp_path / name).write_text(text, encoding="latin-1")
    monkeypatch.setattr(opening, "download", lambda name, allow_patterns: tmp_path)
    said_of(tmp_path, CONFIGS["qwen3"])


def test_a_config_that_is_missing_or_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"^m: there is no config\.json"):
        read_config(tmp_path, "m")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CannotStart, match=r"^m: config\.json cannot be read: Is a directory\."):
        read_config(tmp_path, "m")
    with pytest.raises(CannotStart, match=r"config\.json cannot be read"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(CannotStart, match=r"^m: config\.json is not JSON"):
        read_config(tmp_path, "m")
