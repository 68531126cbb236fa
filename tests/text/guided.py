"""Guides for tokenizers of several formats, made of the tiny model's."""

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from schemas import ChatRequest
from tests.support.stack import TINY_CHAT
from tests.text.dialects.reading import BY_NAME
from tests.text.structured import Schema, allowed
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import load_tokenizer
from worker.errors import JobFailure
from worker.text.dialects.values import Parameters
from worker.text.grammar.builder import Grammars
from worker.text.grammar.guide import GrammarStates, constraint_of, markup_of
from worker.text.grammar.llg_tokenizer import llguidance_tokenizer
from worker.text.grammar.row.calls import CallMatchers, CallsGrammar, Openings
from worker.text.grammar.row.grammar import RowGrammar
from worker.text.grammar.sandbox import compile_grammar
from worker.text.output.formats import ModelFormat
from worker.text.output.harmony import MARKERS
from worker.text.output.output import Output, OutputDelta
from worker.text.prompt.prompt import Prompt, Thinking
from worker.text.tokenizer import Vocabulary

EOS, OTHER_EOS = 2, 0


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


CLOCK = {"type": "function", "function": {"name": "clock"}}


# Of formats, and the tokens that they need besides the tiny model's.
ADDED = {
    "mistral": ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
    "mistral_list": ["[TOOL_CALLS]"],
    "harmony": [*MARKERS, "<|constrain|>"],
    "glm": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "deepseek_v3.2": ["｜DSML｜"],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "minimax_m3": ["]<]minimax[>["],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"],
}


FORCED = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
    "mistral_list": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}, "id": "a1B2c3D4e"}]',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "harmony": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}',
}


class Model:
    """The tiny model's tokenizer, were it another model's."""

    def __init__(self, format: str) -> None:
        self.tokenizer = MLXTokenizer(load_tokenizer(_folder(format), eos_token_ids=[EOS, OTHER_EOS]))
        self.count = len(self.tokenizer.tokens)
        found = ModelFormat.of(self.tokenizer)
        self.dialect = replace(found, dialect=BY_NAME.get(format.removesuffix("_list")))
        self.guides = GrammarStates(self.tokenizer, Vocabulary(self.tokenizer), self.dialect, self.count)
        vocabulary = llguidance_tokenizer(self.tokenizer, Vocabulary(self.tokenizer), self.count)
        assert vocabulary
        self.vocabulary = vocabulary

    async def guide(self, thinking: Thinking = "closed", **fields: Any) -> RowGrammar:
        guide = await self.guides.create(request(**fields), Prompt((1,), thinking))
        assert isinstance(guide, RowGrammar)
        return guide

    def quick_guide(self, asked: ChatRequest, clock: Callable[[], float] = lambda: 0.0) -> RowGrammar:
        """Return the grammar state without a trial in a child process. `clock`: of the time that drafts take."""
        wish = constraint_of(asked)
        assert wish
        grammar = Grammars(markup_of(self.tokenizer, self.dialect)).grammar(wish, has_thought=False)
        matcher, drafts = (compile_grammar(self.vocabulary, grammar) for _ in range(2))
        return RowGrammar(matcher, frozenset({EOS, OTHER_EOS}), drafts=drafts, clock=clock)

    @cached_property
    def openings(self) -> Openings:
        ends = frozenset({EOS, OTHER_EOS})
        return Openings(Vocabulary(self.tokenizer), self.dialect, ends)

    def calls_guide(
        self, asked: ChatRequest, thinking: Thinking = "none", *, hold: bool = True, strict: bool = False
    ) -> CallsGrammar:
        """Return the grammar state of a free answer, whose calls are held, without a trial in a child process."""
        constraint = constraint_of(asked, hold_calls=hold)
        assert constraint
        assert constraint.in_text
        grammar = self.guides._grammars.grammar(constraint, has_thought=False)
        matcher, drafts = (compile_grammar(self.vocabulary, grammar) for _ in range(2))
        matchers = Future[CallMatchers | None]()
        new_grammar = partial(RowGrammar, ends=frozenset({EOS, OTHER_EOS}), clock=lambda: 0.0)
        tokens_of = partial(self.guides._tokens_of, self.vocabulary)
        matchers.set_result(CallMatchers(matcher, drafts, tokens_of, new_grammar))
        functions = {tool.function.name: Parameters(tool.function.parameters) for tool in asked.offered_tools}
        return CallsGrammar(self.openings, thinking, functions, matchers, strict=strict)

    def spelled(self, text: str) -> list[int]:
        """Encode character by character, but for harmony's markers, which are read as tokens of their own alone."""
        parts = re.split(f"({'|'.join(map(re.escape, MARKERS))})", text) if self.dialect.harmony else [text]
        return [t for part in parts for t in (self.tokenizer.encode(part) if part in MARKERS else spelled(part))]

    def takes(self, guide: RowGrammar, text: str) -> bool:
        """True if the grammar allows all of the text, and its end."""
        for token in self.tokenizer.encode(text):
            if token not in allowed(guide, self.count):
                return False
            guide.accept(token)
        return guide.error is None and {EOS, OTHER_EOS} <= set(allowed(guide, self.count))

    def said(self, asked: ChatRequest, tokens: list[int], thinking: Thinking = "none") -> tuple[OutputDelta, str]:
        output = Output(Vocabulary(self.tokenizer), self.dialect, asked, thinking, "job")
        said = sum((output.feed(token) for token in tokens), OutputDelta()) + output.flush()
        return said, output.finish_reason("stop")


def _folder(format: str) -> Path:
    folder = Path(mkdtemp())
    definition = json.loads((TINY_CHAT / "tokenizer.json").read_text())
    for token in ADDED.get(format, []):
        entry = {**definition["added_tokens"][0], "id": 1014 + len(definition["added_tokens"]), "content": token}
        definition["added_tokens"].append(entry)
    config = json.loads((TINY_CHAT / "tokenizer_config.json").read_text())
    if format in ("none", "harmony"):
        config["chat_template"] = "{{ messages }}"
    elif format.startswith("mistral"):
        config["chat_template"] = "[TOOL_CALLS][ARGS]" if format == "mistral" else "[TOOL_CALLS]"
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copyfile(TINY_CHAT / "config.json", folder / "config.json")
    return folder


@cache
def model(format: str = "hermes") -> Model:
    return Model(format)


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hello"}], **fields})


def by(asked: Schema) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked}}}


ANY_OBJECT = {"response_format": {"type": "json_object"}}


async def refusal(format: str = "hermes", **fields: Any) -> JobFailure:
    with pytest.raises(JobFailure) as refused:
        await model(format).guide(**fields)
    return refused.value


def fresh() -> GrammarStates:
    return GrammarStates(model().tokenizer, Vocabulary(model().tokenizer), model().dialect, 1024)


def spelled(text: str) -> list[int]:
    """Encode character by character, so that no token is a marker."""
    return [token for char in text for token in model().tokenizer.encode(char)]


SIGNS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", *MARKERS, "<b>", "é", '"', " "]
