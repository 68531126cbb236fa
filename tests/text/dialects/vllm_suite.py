"""Runs vLLM's tests of tool parsers with our reader in the place of its parsers: a plugin of pytest, in a process of
its own. Every module of `vllm` is a stand-in, so the suite's own assertions judge what we read.

`SUITE_REPORT`: the file that receives the outcomes. `SUITE_CALLS`: that of an earlier run; it tells how often each test
hands text to a parser that streams, since only the last time tells that the answer ends.
"""

import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import transformers

import tests
from tests.text.dialects.reading import BY_NAME, output
from worker.text.output.events import message_tool_calls
from worker.text.output.formats import ModelFormat
from worker.text.output.output import Output

# Our dialect by vLLM's name of a parser, without the words that all have. Others have no row in the table.
DIALECTS = {
    "apertus": "apertus", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v3.1", "deepseekv32": "deepseek_v3.2",
    "deepseekv4": "deepseek_v4", "ernie45": "hermes", "functiongemma": "function_gemma", "gemma4": "gemma4",
    "gigachat3": "gigachat3", "glm45": "glm", "glm47": "glm", "glm47moemodel": "glm", "glm4moemodel": "glm",
    "granite": "granite3", "granite4": "hermes", "hermes": "hermes", "hermes2pro": "hermes",
    "hunyuana13b": "tool_calls", "hyv3": "hunyuan_plain", "internlm": "internlm", "internlm2": "internlm",
    "jamba": "tool_calls", "kimik2": "kimi_k2", "kimik3": "kimi_k3", "lfm2": "lfm2", "llama3json": "llama3",
    "llama": "llama3", "llama4pythonic": "llama4", "pythonic": "llama4", "longcat": "longcat",
    "longcatflash": "longcat", "minicpm5": "minicpm5", "minicpm5xml": "minicpm5", "minimax": "tool_calls",
    "minimaxm2": "minimax_m2", "minimaxm3": "minimax_m3", "mistral": "mistral", "olmo3": "olmo3",
    "olmo3pythonic": "olmo3", "phi4minijson": "phi4", "poolsidev1": "glm", "qwen3coder": "qwen3_coder",
    "qwen3xml": "qwen3_coder", "seedoss": "seed", "step3p5": "qwen3_coder",
}  # fmt: skip


class Text(str):
    """Content, equal up to white space: vLLM's parsers differ in what they keep of it beside a call."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.split() == other.split()

    __hash__ = str.__hash__


class Record:
    """A value with any attributes, as the classes of requests and answers have them; those without a value are None."""

    def __init__(self, *given: Any, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return [] if name == "tool_calls" else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return id(self)

    def model_dump(self, **how: Any) -> dict[str, Any]:
        return {name: _plain(value) for name, value in self.__dict__.items() if value is not None}

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        return cls(**value) if isinstance(value, dict) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.model_dump()
    return [_plain(each) for each in value] if isinstance(value, list) else value


class FunctionCall(Record):
    """A call with its function's name and its arguments."""


class ToolCall(Record):
    """A call of an answer."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"id": "call_1", "type": "function", **fields})


@dataclass
class Extracted:
    """What vLLM's parsers return."""

    tools_called: bool
    tool_calls: list[Any] = field(default_factory=list)
    content: str | None = None


class NotOurs(Exception):
    """The test asks for something else than reading an answer, or in a form that has no row in the table."""


class Current:
    """The running test."""

    name = ""
    read = 0  # answers that were read in it
    parsers = 0  # parsers that were made in it
    streamed: ClassVar = Counter[str]()  # texts that each parser has received in pieces


class Parser:
    """Reads answers in a dialect, behind the methods of vLLM's parsers."""

    dialect: Any = None

    def __init__(self, tokenizer: Any = None, tools: Any = None, *more: Any, **others: Any) -> None:
        if self.dialect is None:
            raise NotOurs(type(self).__name__)
        self.model_tokenizer, self._tools = tokenizer, tools
        self.vocab = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        Current.parsers += 1
        self._key = f"{Current.name} {Current.parsers}"
        self._answer: Any = None

    def extract_tool_calls(self, text: str, request: Any = None, **more: Any) -> Extracted:
        Current.read += 1
        answer = _output(self.dialect, self._tools or getattr(request, "tools", None))
        said = answer.feed(text) + answer.flush()
        calls = [
            ToolCall(id=call["id"], function=FunctionCall(**call["function"]))
            for call in message_tool_calls(said.tool_calls)
        ]
        return Extracted(bool(calls), calls, Text(said.content) if said.content.strip() else None)

    def extract_tool_calls_streaming(
        self, previous_text: str = "", current_text: str = "", delta_text: str = "", previous_token_ids: Any = (),
        current_token_ids: Any = (), delta_token_ids: Any = (), request: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        Current.read += 1
        if self._answer is None or not previous_text:
            self._answer = _output(self.dialect, self._tools or getattr(request, "tools", None))
        if previous_text + delta_text != current_text or __name__ in current_text:
            raise NotOurs("a text of another tokenizer's pieces, or of stand-ins")
        Current.streamed[self._key] += 1
        said = self._answer.feed(delta_text)
        if Current.streamed[self._key] == CALLS.get(self._key):
            said += self._answer.flush()
        calls = [Record(**{**call, "function": Record(**call["function"])}) for call in said.tool_calls]
        return Record(content=said.content or None, tool_calls=calls) if said else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotOurs(f"{type(self).__name__}.{name}")


def _output(dialect: Any, tools: Any) -> Output:
    # A tool of the Responses API is the function itself.
    functions = [_of(tool, "function") or tool for tool in (tools if isinstance(tools, list) else [])]
    offered = {str(_of(each, "name")): _of(each, "parameters") for each in functions}
    return output(ModelFormat(False, dialect, "none", None), offered)


def _of(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def parser_of(name: str) -> type[Parser]:
    """Return the class for vLLM's name of a parser, or of its class."""
    short = re.sub(r"toolparser|tool_parser|engine|[-_]", "", name.lower())
    return type(name, (Parser,), {"dialect": BY_NAME.get(DIALECTS.get(short, ""))})


class ToolParserManager:
    """Finds parsers by name."""

    get_tool_parser = staticmethod(parser_of)
    tool_parsers: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def register_module(*given: Any, **named: Any) -> Any:
        return lambda cls: cls


class _Finder(MetaPathFinder, Loader):
    """Makes modules of vllm, and the parts of torch that tests name, out of nothing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ("vllm", "torch") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = {
            "ToolParserManager": ToolParserManager, "ToolParser": Parser, "ExtractedToolCallInformation": Extracted,
            "ToolCall": ToolCall, "FunctionCall": FunctionCall, "get_tokenizer": _tokenizer,
        }  # fmt: skip
        if name in known:
            return known[name]
        if name.endswith("ToolParser"):
            return parser_of(name)
        return type(name, (Record,), {})


def _tokenizer(*given: Any, **named: Any) -> "Words":
    return Words()


class Words:
    """A tokenizer of words, with the space before them, and marks, in the place of those that the suite would
    download."""

    @classmethod
    def from_pretrained(cls, *given: Any, **named: Any) -> "Words":
        return cls()

    def __init__(self) -> None:
        self._ids = dict[str, int]()

    def get_vocab(self) -> Any:
        return self._ids

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r" ?\w+|\s|[^\w\s]", text)

    def encode(self, text: str, **how: Any) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in self.tokenize(text)]

    def decode(self, ids: Any, **how: Any) -> str:
        words = list(self._ids)
        return "".join(words[id] for id in ([ids] if isinstance(ids, int) else ids))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotOurs(f"tokenizer.{name}")


CALLS: dict[str, int] = (
    json.loads(Path(os.environ["SUITE_CALLS"]).read_text())["calls"] if os.environ.get("SUITE_CALLS") else {}
)
REPORT: dict[str, Any] = {"calls": {}, "tests": {}}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    Current.name, Current.read, Current.parsers = item.nodeid, 0, 0
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    report = yield
    if report.when == "call":
        ours = Current.read and not (
            call.excinfo and call.excinfo.errisinstance((NotOurs, AttributeError, TypeError, ImportError))
        )
        outcome = report.outcome if ours else "not ours"
        if ours and report.failed and not call.excinfo:
            outcome = "passed"  # though vLLM's own parser fails
        if report.outcome == "skipped" and hasattr(report, "wasxfail"):
            outcome = "not ours"  # what vLLM does not read either
        REPORT["tests"][item.nodeid] = [outcome, str(call.excinfo.value)[:600] if call.excinfo else ""]
    elif report.failed:
        REPORT["tests"][item.nodeid] = ["not ours", str(call.excinfo.value)[:300] if call.excinfo else ""]
    return report


def pytest_sessionfinish() -> None:
    REPORT["calls"] = dict(Current.streamed)
    Path(os.environ["SUITE_REPORT"]).write_text(json.dumps(REPORT))


# At import, since pytest imports the suite's conftest.py before it configures plugins.
sys.meta_path.insert(0, _Finder())
tests.__path__.append(os.environ["SUITE"])  # the suite's modules import one another as `tests.`
transformers.AutoTokenizer.from_pretrained = Words.from_pretrained  # type: ignore[method-assign]
