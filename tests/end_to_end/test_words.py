"""`sluice prompt` and `sluice parse`, without a server and without weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_check import environment
from tests.end_to_end.test_cli import run_here
from tests.support.stack import ROOT, TINY_CHAT

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
REQUEST = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL]}
NO_SYSTEM = "{{ m.role if m.role != 'system' else raise_exception('No.') }}"


def words(*args: str, stdin: str = "") -> tuple[int, str, str]:
    return run_here(*args, "--model", str(TINY_CHAT), env=environment(), folder=ROOT, stdin=stdin)


def test_the_prompt_is_printed_with_its_tokens() -> None:
    code, text, _ = words("prompt", stdin=json.dumps(REQUEST))
    assert code == 0
    assert "<|im_start|>user\nWeather?<|im_end|>" in text
    assert '"name": "weather"' in text
    _, printed, _ = words("prompt", "--json", stdin=json.dumps(REQUEST))
    facts = json.loads(printed)
    assert facts["text"] == text.removesuffix("\n")
    assert len(facts["tokens"]) > 10
    assert [why.partition(" into ")[0] for why in facts["adapted"]] == ["writes tools only"]


def with_template(folder: Path, template: str) -> None:
    for file in TINY_CHAT.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    (folder / "chat_template.jinja").write_text(template)


def test_an_answer_of_a_model_whose_template_takes_no_tools_is_read(tmp_path: Path) -> None:
    with_template(tmp_path, "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    args = ("parse", "--model", str(tmp_path))
    code, printed, told = run_here(*args, env=environment(), folder=ROOT, stdin="Hello")
    assert (code, told) == (0, "")
    assert json.loads(printed)["content"] == "Hello"


def test_what_was_changed_for_the_template_is_told_on_stderr(tmp_path: Path) -> None:
    with_template(tmp_path, f"{{% for m in messages %}}{NO_SYSTEM}:{{{{ m.content }}}};{{% endfor %}}")
    messages = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    args = ("prompt", "--model", str(tmp_path))
    code, text, told = run_here(*args, env=environment(), folder=ROOT, stdin=json.dumps(messages))
    assert (code, text) == (0, "user:Be brief.\n\nHi;\n")
    assert "accepts no system role" in told


def test_where_the_next_turn_is_computed_again_is_told_with_the_reason(tmp_path: Path) -> None:
    last = "{% set ns = namespace() %}{% for m in messages if m.role == 'user' %}{% set ns.last = m %}{% endfor %}"
    each = "{% for m in messages %}{{ tools if tools and m == ns.last }}{{ m.content }};{% endfor %}"
    with_template(tmp_path, last + each)
    args = ("prompt", "--model", str(tmp_path))
    look = {"type": "function", "function": {"name": "look"}}
    asked = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "tools": [look]})
    code, _, told = run_here(*args, env=environment(), folder=ROOT, stdin=asked)
    assert code == 0
    assert "from token 0 of" in told
    assert "in front of the last user message" in told
    _, printed, _ = run_here(*args, "--json", env=environment(), folder=ROOT, stdin=asked)
    assert json.loads(printed)["next_turn"]["computed_from"] == 0
    _, printed, _ = words("prompt", "--json", stdin=json.dumps({"messages": [{"role": "user", "content": "Hi"}]}))
    assert json.loads(printed)["next_turn"] is None


def test_what_has_no_effect_on_the_prompt_is_told() -> None:
    hello = {"messages": [{"role": "user", "content": "Hi"}], "verbosity": "low"}
    code, _, told = words("prompt", stdin=json.dumps(hello))
    assert code == 0
    assert "does not read verbosity" in told
    _, printed, _ = words("prompt", "--json", stdin=json.dumps(hello))
    assert [why.partition(":")[0] for why in json.loads(printed)["adapted"]] == ["does not read verbosity"]


def test_images_are_refused_whatever_the_model() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    code, text, told = words("prompt", stdin=json.dumps({"messages": [{"role": "user", "content": [picture]}]}))
    assert (code, text) == (2, "")
    assert "this model" not in told
    assert "image_url" in told


@pytest.mark.parametrize("body", ['{"messages": []}', json.dumps({**REQUEST, "topp": 1}), "no JSON"])
def test_a_request_that_is_wrong_is_refused_with_a_sentence(body: str) -> None:
    code, text, told = words("prompt", stdin=body)
    assert (code, text) == (2, "")
    assert told.startswith("sluice: ")


@pytest.mark.parametrize("with_request", [True, False])
def test_an_answer_is_read_as_a_worker_reads_it(tmp_path: Path, with_request: bool) -> None:
    answer = tmp_path / "answer.txt"
    answer.write_text('I will look.\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo",}}')
    request = tmp_path / "request.json"
    request.write_text(json.dumps(REQUEST))
    given = ("--request", str(request)) if with_request else ()
    code, printed, _ = words("parse", "--file", str(answer), *given)
    facts: dict[str, Any] = json.loads(printed)
    assert code == 0
    assert (facts["dialect"], facts["content"], facts["finish_reason"]) == ("hermes", "I will look.", "tool_calls")
    assert facts["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert len(facts["repaired"]) == 2


def test_a_file_that_is_not_there_is_named() -> None:
    code, _, told = words("parse", "--file", "nowhere.txt")
    assert (code, "nowhere.txt" in told) == (2, True)


@pytest.mark.parametrize(
    "command", [["prompt"], ["prompt", "--json"], ["parse", "--request", "-", "--file", os.devnull]]
)
@pytest.mark.parametrize("request_text", ["[1, 2]", '{"messages": "Hi"}'])
def test_a_broken_request_is_refused_before_the_model_is_opened(command: list[str], request_text: str) -> None:
    args = (*command, "--model", "/no/such/model")
    code, text, told = run_here(*args, env=environment(), folder=ROOT, stdin=request_text)
    assert (code, text) == (2, "")
    assert "no/such/model" not in told


def test_a_broken_request_is_refused_without_the_models_libraries(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"messages": "Hi"}')
    code = "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None; from sluice.cli import main; main()"
    args = [sys.executable, "-c", code, "prompt", "--model", "tiny", "--file", str(file)]
    run = subprocess.run(args, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (2, "sluice: messages must be a list, not a string.\n")


def test_an_answer_that_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path) -> None:
    code, _, told = words("parse", "--file", str(tmp_path / "missing"))
    assert (code, told) == (2, f"sluice: cannot read {tmp_path / 'missing'}: No such file or directory.\n")
    (tmp_path / "long").write_text("x" * 16_000_001)
    code, _, told = words("parse", "--file", str(tmp_path / "long"))
    assert (code, "larger than the limit of 16,000,000 bytes" in told) == (2, True)
