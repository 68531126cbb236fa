"""Answers in the formats of several models, and their parsed output, with the tiny tokenizer."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from schemas import ChatRequest
from tests.support.stack import TINY_CHAT
from tests.text.dialects.reading import BY_NAME
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import TokenizerWrapper, load_tokenizer
from worker.text.dialects.table import THOUGHTS
from worker.text.output.events import message_tool_calls
from worker.text.output.formats import ModelFormat
from worker.text.output.harmony import MARKERS
from worker.text.output.output import Output, OutputDelta, concat
from worker.text.tokenizer import Vocabulary

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


OWN_THOUGHTS = {
    "kimi_k3": "<|open|>think<|sep|>",
    "muse_spark": "to=self<|message|>",
}  # of those with markers of their own


@dataclass(frozen=True)
class Model:
    words: MLXTokenizer
    vocabulary: Vocabulary
    dialect: ModelFormat


@cache
def model(dialect: str = "hermes", *tokens: str) -> Model:
    """Return the tiny model, were it one of a dialect, with additional tokens."""
    wrapper = load_tokenizer(Path(TINY_CHAT))
    wrapper._tokenizer.add_tokens(list(tokens), special_tokens=True)
    words = MLXTokenizer(TokenizerWrapper(wrapper._tokenizer, type(wrapper.detokenizer), wrapper.eos_token_ids))
    thoughts = next(each for each in THOUGHTS if each.begin == OWN_THOUGHTS.get(dialect, "<think>"))
    found = ModelFormat.of(words)
    return Model(words, Vocabulary(words), replace(found, dialect=BY_NAME[dialect], thoughts=thoughts))


def gpt_oss() -> Model:
    return model("hermes", *MARKERS, "<|constrain|>")


def kimi_k3() -> Model:
    return model("kimi_k3", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], **fields})


def output(model: Model, thinking: Any = "none", **fields: Any) -> Output:
    return Output(model.vocabulary, model.dialect, request(**fields), thinking, "job-1")


def cut(model: Model, text: str, places: Iterable[int]) -> list[int]:
    """The tokens of a text that is cut at these places, so that a marker may take several, unless it is harmony's."""
    marks = [found.span() for found in re.finditer("|".join(map(re.escape, MARKERS)), text) if model.dialect.harmony]
    cuts = sorted(place % (len(text) + 1) for place in places)
    edges = [0, *(cut for cut in cuts if not any(a < cut < b for a, b in marks)), len(text)]
    return [token for a, b in pairwise(edges) for token in model.words.encode(text[a:b])]


@dataclass(frozen=True)
class Heard:
    said: OutputDelta
    finish_reason: str
    repaired: tuple[str, ...] = ()

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Return the calls of the result, without their ids."""
        return [call["function"] for call in message_tool_calls(self.said.tool_calls)]


def hear(output: Output, tokens: Iterable[int], engine: Any = "stop") -> Heard:
    """The whole answer, as a job makes it of what the engine does."""
    said = []
    for token in tokens:
        said.append(output.feed(token))
        if output.stopped:
            break
    else:
        said.append(output.flush(engine))
    return Heard(concat(said), output.finish_reason("stop" if output.stopped else engine), tuple(output.repaired))


def heard(model: Model, text: str, thinking: Any = "none", engine: Any = "stop", **fields: Any) -> Heard:
    return hear(output(model, thinking, **fields), model.words.encode(text), engine)


PLACES = st.lists(st.integers(0, 400), max_size=30)
THINKING = st.sampled_from(["open", "closed", "none"])
ENGINES = st.sampled_from(["stop", "length"])
WORDS = ["a", " ", "\n", "é", "🙂", "END", "<", "</", "{", "}", '"', "[", "null", "12", ": ", ",", "\\u00e9", "weather"]


def texts(*fragments: str) -> st.SearchStrategy[str]:
    """Strategy of texts from these fragments."""
    known, any_word = st.sampled_from(fragments), st.sampled_from(WORDS)
    return st.lists(known | known | any_word, max_size=12).map("".join)


_OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
SPEAKERS = (
    (model(), [
        "<think>", "</think>", "<tool_call>", "</tool_call>", _OSLO, f"<tool_call>{_OSLO[:-5]}", _OSLO[-5:],
        f"<tool_call>\n{_OSLO}\n</tool_call>", '<tool_call>{"arguments": {"days": [1, {}]}, "name": "now"}',
    ]),
    (model("mistral"), [
        "<think>", "</think>", "[TOOL_CALLS]", "weather[ARGS]", '{"city": "Oslo"}', f"[TOOL_CALLS][{_OSLO}]",
        "[TOOL_CALLS]now[ARGS]{}", '[TOOL_CALLS]weather[ARGS]{"city": "', '"}',
    ]),
    (model("qwen3_coder"), [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "</function>",
        "<parameter=city>Oslo</parameter>", "<tool_call><function=now></function></tool_call>",
    ]),
    (gpt_oss(), [
        "<|start|>", "assistant", "<|channel|>", "final", "analysis", "commentary", "<|message|>", "<|end|>",
        "<|call|>", " to=functions.weather", '{"city": "Oslo"}', "<|return|>", "<|start|>assistant<|channel|>final",
        '<|channel|>commentary to=functions.weather json<|message|>{"city": ', '"Oslo"}<|call|>',
    ]),
    (kimi_k3(), [
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|open|>tools<|sep|>",
        '<|open|>call tool="now"<|sep|><|close|>call<|sep|>', "<|close|>tools<|sep|>",
    ]),
)  # fmt: skip
ANSWERS = st.sampled_from(SPEAKERS).flatmap(lambda speaker: st.tuples(st.just(speaker[0]), texts(*speaker[1])))
REQUESTS = st.fixed_dictionaries(
    {"tools": st.sampled_from([TOOLS, TOOLS, TOOLS, None])},
    optional={
        "stop": st.lists(st.sampled_from(["END", "\n\n", "a<", "}"]), min_size=1, max_size=2),
        "parallel_tool_calls": st.booleans(),
    },
)
