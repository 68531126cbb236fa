"""What public suites expect to be read of answers. The suites are fetched, so the tests run with `--all` alone."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.text.dialects.llama_suite import Case, Suite, as_tool
from tests.text.dialects.reading import output
from tests.text.dialects.real_templates import fetch, fetch_suite, tokenizer
from worker.text.output.events import message_tool_calls
from worker.text.output.formats import ModelFormat, _rendered
from worker.text.prompt.prompt import _thinking

pytestmark = [pytest.mark.registry, pytest.mark.slow]

# Tokens that end an answer, which are no text for us.
_END = re.compile(r"(<\|eot\|>|<\|role_end\|>|<\|END_OF_TURN_TOKEN\|>)$|^<\|CHATBOT_TOKEN\|>")
_THOUGHT_IN_CONTENT = "COMMON_REASONING_FORMAT_NONE"


def is_ours(case: Case) -> bool:
    """False for a case of what a client gets from us otherwise: a continued or a partial answer, one by a schema, and
    thoughts that stay in the content."""
    other = case.given.keys() & {"continue_final_message", "is_partial", "json_schema"}
    thinks = case.given.get("reasoning_format", _THOUGHT_IN_CONTENT) != _THOUGHT_IN_CONTENT
    return not other and (
        thinks or not any(mark in case.given["test"] for mark in ("think", "THINK", "analysis", "thought"))
    )


def differs(case: Case, templates: dict[str, str]) -> str:
    """Return how what we read differs from what the suite expects; an empty string if it does not."""
    words = tokenizer(templates[f"llama-cpp-python: {Path(case.template).stem}"])
    tools = [as_tool(each) for each in case.given.get("tools", [])]
    variables = {"enable_thinking": case.given.get("enable_thinking", True)}
    prompt = _rendered(words, [{"role": "user", "content": "Hey there!"}], tools, variables) or ""
    form = ModelFormat.of(words)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    answer = output(form, schemas, _thinking(prompt, "", form.think))
    said = answer.feed(_END.sub("", case.given["test"])) + answer.flush()
    content, reasoning, calls = case.expected
    found = [
        (call["function"]["name"], _value(call["function"]["arguments"]))
        for call in message_tool_calls(said.tool_calls)
    ]
    wanted = [(name, _value(arguments or "{}")) for name, arguments in calls]
    ours, theirs = (said.content.split(), said.reasoning.split(), found), (content.split(), reasoning.split(), wanted)
    return "" if ours == theirs else f"{case.given['test']!r}\n  ours {ours}\n  theirs {theirs}"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# The number of cases that differ, and why, by family.
LLAMA_DIFFERS = {
    "Qwen3.5-4B": (1, "the suite takes a second marker of a thought for a word of it"),
    "google-gemma-4-31B-it": (1, "half of a marker before a whole one stays"),
    "inclusionai-ling-3.0-flash": (2, "a thought that the prompt begins is one, with a call that text follows too"),
    "MiniMax-M3": (1, "elements of a text or an object are the object, and not their markup"),
    "llama-cpp-deepseek-r1": (1, "its template cannot render tools: found by its markers, which two dialects share"),
    "Apriel-1.6-15b-Thinker-fixed": (2, "the sentence with which the prompt begins a thought is no part of it"),
    "muse-glimmer": (1, "a call in a message to the user is a call"),
    "openai-gpt-oss-120b": (2, "a call of a function that is not offered is a call"),
}
VLLM_DIFFERS = {
    "apertus": (1, "white space before a call is not kept"),
    "deepseekv31": (1, "text after a call is kept"),
    "deepseekv32": (1, "5.0 is a number as it was written, and not 5"),
    "functiongemma": (1, "JSON is compared by its white space"),
    "gemma4": (
        4,
        "a name has no spaces: arguments begin there; a string without its end is delivered as it was written",
    ),
    "hunyuan_a13b": (1, "text after a call is kept"),
    "kimi_k2": (3, "text after a call, or before one, is kept; a call of any name is a call"),
    "llama3_json": (
        3,
        "JSON within prose is no call without a marker, nor is prose left out; broken JSON behind a name is one",
    ),
    "minicpm5xml": (21, "marks of a tokenizer in the text; renamed functions; calls that break the schema are calls"),
    "minimax_m2": (1, "white space before a call is not kept"),
    "minimax_m3": (1, "white space before a call is not kept"),
    "step3p5": (1, "text after a call is kept"),
}


@pytest.fixture(scope="module")
def cache(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("chat_templates")


def test_llama_cpps_suite_is_read_but_for_known_cases(cache: Path) -> None:
    templates = fetch(cache)
    suite = Suite((fetch_suite(cache, "llama-cpp-python") / "test-chat.cpp").read_text(encoding="utf-8")).read()
    assert suite.unread <= 3
    cases = [case for case in suite.cases if is_ours(case)]
    differing = Counter(Path(case.template).stem for case in cases if differs(case, templates))
    assert differing == {family: count for family, (count, _) in LLAMA_DIFFERS.items()}
    assert differing.total() <= 0.05 * len(cases)


def test_vllms_suite_is_read_but_for_known_cases(cache: Path, tmp_path: Path) -> None:
    suite = tmp_path / "tests"
    shutil.copytree(fetch_suite(cache, "vllm"), suite / "tool_parsers")
    (suite / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir=.", "-p", "tests.text.dialects.vllm_suite"]
    command += ["-p", "no:cacheprovider", "-p", "no:asyncio", "--import-mode=importlib", "tool_parsers"]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "SUITE": str(suite), "SUITE_CALLS": ""}
    for name in ("calls", "report"):  # the second run knows when the answers end
        environment["SUITE_REPORT"] = str(tmp_path / name)
        command_ = [*command, "--continue-on-collection-errors", "--tb=no"]
        subprocess.run(command_, cwd=suite, env=environment, check=False, timeout=300, capture_output=True)
        environment["SUITE_CALLS"] = str(tmp_path / name)
    outcomes = json.loads((tmp_path / "report").read_text())["tests"]
    failed, passed = Counter[str](), 0
    for name, (outcome, _) in outcomes.items():
        passed += outcome == "passed"
        if outcome == "failed":
            failed[re.sub(r".*/test_|_tool_parser\.py.*", "", name)] += 1
    assert passed >= 445
    assert failed == {family: count for family, (count, _) in VLLM_DIFFERS.items()}
    others = {name: outcome for name, (outcome, _) in outcomes.items() if "minicpm5xml" not in name}
    wanted = [outcome for outcome in others.values() if outcome in ("passed", "failed")]
    assert wanted.count("failed") <= 0.05 * len(wanted)
