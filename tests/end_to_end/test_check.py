"""`sluice check`: its output and its exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.tiny_vision import write_checkpoint as write_seeing
from tests.end_to_end.test_cli import run_here
from tests.engine.tiny import CANNOT_BATCH, CONFIGS, FAMILIES, write_checkpoint
from tests.support.stack import ROOT, TINY_CHAT
from worker.engine.device import memory_for_model

_WITHOUT_WORKER = "import sys; sys.modules['worker'] = None; from sluice.cli import main; main()"


def environment(**settings: str) -> dict[str, str]:
    others = {key: value for key, value in os.environ.items() if not key.startswith("SLUICE_")}
    return {**others, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **settings}


def run(*args: str, **env: str) -> tuple[int, str, str]:
    """Run Python; return exit code, stdout and stderr."""
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=60, env=environment(**env))
    return done.returncode, done.stdout, done.stderr


def check(*args: str, **settings: str) -> tuple[int, str, str]:
    """Run the command in this process; return exit code, stdout and stderr."""
    return run_here("check", *args, env=environment(**settings), folder=ROOT)


def cells(table: str) -> dict[str, str]:
    """Return a table of two columns as a mapping."""
    lines = [line.split("│") for line in table.splitlines() if line.count("│") == 3]
    return {line[1].strip(): line[2].strip() for line in lines}


def test_a_person_sees_what_a_model_gets_in_eighty_columns() -> None:
    code, out, err = run("-m", "sluice.cli", "check", str(TINY_CHAT))
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    said = cells(out)
    assert said["architecture"] == "qwen3_5"
    assert said["weights"] == "2 MB, not quantized; computes in float32"
    assert said["cache layers"] == "2 × recurrent, 2 × kv"
    assert said["drafts"] == "up to 7 tokens; recurrences are replayed"
    assert said["MTP"] == "a qwen3_5 head, used unless SLUICE_SPECULATION=off"
    assert said["a row takes"] == "1 kB a token, 42 kB at any length"
    assert said["reasoning"] == "<think> … </think>"
    assert said["tool calls"] == "hermes: what the chat template writes is read back"
    assert said["schemas"] == "yes"
    assert int(said["32,768"].replace(",", "")) >= 1
    assert "Rows that fit at once with speculation off (at most 512)" in out.splitlines()
    assert check(str(TINY_CHAT)) == (code, out, err)


def test_what_the_terminal_cannot_show_is_a_question_mark() -> None:
    code, out, err = run("-m", "sluice.cli", "check", str(TINY_CHAT), PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert "<think> ? </think>" in out


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("kimi_linear", marks=pytest.mark.slow)])
def test_why_rows_of_a_model_take_no_drafts_is_told(tmp_path: Path, family: str) -> None:
    folder = str(write_checkpoint(FAMILIES[family], tmp_path))
    assert cells(check(folder)[1])["drafts"].startswith("no: its latent attention (MLA)")
    facts = json.loads(check(folder, "--json")[1])
    assert (facts["servable"], facts["max_draft"]) == (True, 0)
    assert "expands the whole context" in facts["drafts_unsupported_reason"]


def test_why_a_head_is_not_used_is_told(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_5"]
    text = {**config.get("text_config", {}), "mtp_num_hidden_layers": 1}
    folder = str(write_checkpoint({**config, "text_config": text}, tmp_path))
    facts = json.loads(check(folder, "--json")[1])
    assert (facts["mtp"], facts["mtp_kind"]) == (False, None)
    assert facts["mtp_unsupported_reason"].startswith("the files lack its weights")
    assert cells(check(folder)[1])["MTP"].startswith("a head that is not used: the files lack")


def test_windows_are_told_apart_from_what_grows(tmp_path: Path) -> None:
    said = cells(check(str(write_checkpoint(CONFIGS["gpt_oss"], tmp_path)))[1])
    assert said["cache layers"] == "2 × rotating of 16, 2 × kv"
    assert said["a row takes"] == "512 B for each of the last 16, 512 B a token"


def test_whether_images_are_served_is_told_as_a_worker_would_do_it(tmp_path: Path) -> None:
    folder = str(write_seeing("mistral3", tmp_path))
    assert cells(check(folder)[1])["vision"] == "yes, as mistral3; vision encoder: 45.4 kB of the weights"
    assert cells(check(folder, SLUICE_VISION="off")[1])["vision"] == "no. SLUICE_VISION is off."
    code, out, _ = check(folder, "--json", SLUICE_VISION="off")
    facts = json.loads(out)
    assert (code, facts["vision"], facts["vision_unsupported_reason"]) == (0, False, "SLUICE_VISION is off.")
    assert facts["encoder_bytes"] == 0


def test_a_program_gets_one_object() -> None:
    code, out, err = check(str(TINY_CHAT), "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert (facts["servable"], facts["blockers"]) == (True, [])
    assert (facts["weights_bytes"], facts["token_bytes"], facts["state_bytes"]) == (2_047_296, 1024, 41_984)
    assert [layer["kind"] for layer in facts["layers"]] == ["recurrent", "kv"] * 2
    assert (facts["mtp"], facts["mtp_kind"], facts["mtp_unsupported_reason"]) == (True, "qwen3_5", None)
    assert [row["tokens"] for row in facts["rows"]] == [2048, 8192, 32_768]
    assert sorted((row["rows"] for row in facts["rows"]), reverse=True) == [row["rows"] for row in facts["rows"]]


@pytest.mark.parametrize(
    ("settings", "memory"),
    [
        ({}, memory_for_model(None, 1.0)),
        ({"SLUICE_MEMORY_HEADROOM_GB": "0.5"}, memory_for_model(None, 0.5)),
        ({"SLUICE_MEMORY_GB": "2"}, 1_000_000_000),
    ],
)
def test_the_memory_is_what_a_worker_with_these_settings_would_take(settings: dict[str, str], memory: int) -> None:
    assert json.loads(check(str(TINY_CHAT), "--json", **settings)[1])["limit_bytes"] == memory


def test_a_setting_that_a_worker_would_refuse_is_refused() -> None:
    code, _, err = check(str(TINY_CHAT), SLUICE_MEMORY_HEADROM_GB="2")
    assert (code, "did you mean SLUICE_MEMORY_HEADROOM_GB?" in err) == (2, True)


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_a_model_that_would_not_be_served_is_told_and_the_exit_code_is_2(tmp_path: Path, how: list[str]) -> None:
    code, out, err = check(str(write_checkpoint(CANNOT_BATCH["llama4"], tmp_path)), *how)
    assert code == 2
    assert "chunked" in out
    assert f"sluice: {tmp_path} cannot be served. This model keeps its context in chunks" in err


def test_what_is_no_model_is_a_sentence_and_no_traceback() -> None:
    assert check("./no/such/folder") == (2, "", "sluice: ./no/such/folder: there is no such folder.\n")


def test_without_the_worker_installed_the_way_out_is_said() -> None:
    code, out, err = run("-c", _WITHOUT_WORKER, "check", str(TINY_CHAT))
    assert (code, out) == (2, "")
    assert "run ./scripts/setup worker,server" in err


def test_help_has_an_example_and_the_exit_codes() -> None:
    code, out, _ = check("--help")
    assert code == 0
    assert "sluice check models/tiny-chat" in out
    assert "Exit codes" in out
