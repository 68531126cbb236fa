"""The format of a model's output: how it marks reasoning, tool calls and content."""

import re
from typing import Any

from worker.text.output import coder_values, harmony
from worker.text.output.events import CallFormat, OutputParser, Tools
from worker.text.output.harmony import Harmony, HarmonyCalls, named
from worker.text.output.markers import MarkerParser
from worker.text.prompt.prompt import Thinking
from worker.text.tokenizer import Tokenizer, Transitions

# Think markers of Magistral and Seed-OSS, which mlx-lm 0.32 does not detect.
_THINK = (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
_MORE_MARKERS = ("kimi_k3", "muse_spark")  # formats with additional markers, which mlx-lm detects
_MISTRAL = re.compile(r"\s*([\w-]+)\s*\[ARGS\]\s*")
# From each occurrence of these texts, mlx-lm's parsers of these formats search the rest of the text.
_SEARCHED_FROM = {
    "function_gemma": "call:", "gemma4": "call:", "glm47": "<arg_key>", "kimi_k3": "<|open|>", "laguna": "<arg_key>",
    "longcat": "<longcat_arg_key>", "muse_spark": "<atem:",
}  # fmt: skip
# Occurrences times characters: about 50 ms on the event loop, while 20 kB of occurrences alone would take seconds. A
# call with ten arguments may have 40 kB.
_MAX_SEARCHED = 400_000
_MAX_HEADER = 100  # characters; a function's name has at most 64


class ModelFormat:
    """The output format of one model; a worker has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = frozenset(tokenizer.tokens)
        self._tokenizer = tokenizer
        self.harmony = tokens.issuperset(harmony.MARKERS)
        self.think = tokenizer.think or next((pair for pair in _THINK if tokens.issuperset(pair)), None)
        self.calls: CallFormat = HarmonyCalls() if self.harmony else _call_format(tokenizer)

    def parser(self, thinking: Thinking, *, calls: bool) -> OutputParser | None:
        """Return a parser for one answer, or None if there are no markers to detect.

        `calls`: the request offers tools.
        """
        tokenizer, tool = self._tokenizer, self._tokenizer.tool
        if self.harmony:
            return Harmony(tokenizer.splitter("<|start|>", harmony.TRANSITIONS))
        if not self.think and not (tool and calls):
            return None
        state = "reasoning" if thinking == "open" else "normal"
        transitions = self._transitions(tool if calls else None)
        return MarkerParser(lambda at: tokenizer.splitter(at, transitions), state, tool or ("", ""), calls=calls)

    def _transitions(self, tool: tuple[str, str] | None) -> Transitions | None:
        """Return the transitions that mlx-lm infers, and two more; None if mlx-lm's have markers that are not here.

        A model may repeat the think marker that its prompt ended with. If a format has no end marker for calls, the
        start of another call ends one too.
        """
        if self._tokenizer.tool_format in _MORE_MARKERS:
            return None
        found: Transitions = {"normal": []}
        if self.think:
            start, end = self.think
            found["normal"].append((start, "reasoning"))
            found["reasoning"] = [(start, "reasoning"), (end, "normal")]
        if tool:
            start, end = tool
            for edges in found.values():
                edges.append((start, "tool"))
            found["tool"] = [(end, "normal")] if end else [(start, "tool")]
        return found


def _call_format(tokenizer: Tokenizer) -> CallFormat:
    match tokenizer.tool_format:
        case "json_tools":
            return _JsonCalls(tokenizer)
        case "mistral":
            return _MistralCalls(tokenizer)
    return _OtherCalls(tokenizer)


class _OtherCalls:
    """Calls in a form that mlx-lm parses when they are complete."""

    is_json = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def as_json(self, opening: str, text: str) -> str | None:
        """Raise ValueError."""
        raise ValueError("The calls of this format are not JSON.")

    def parse(self, opening: str, text: str, tools: Tools) -> list[dict[str, Any]]:
        """Parse with mlx-lm's parser, unless that may take seconds."""
        if self._tokenizer.tool_format == "qwen3_coder":
            _check_coder(text)
        searched_from = _SEARCHED_FROM.get(self._tokenizer.tool_format or "")
        if searched_from and text.count(searched_from) * len(text) > _MAX_SEARCHED:
            raise ValueError("The text is not a tool call: it has too many beginnings of arguments.")
        if self._tokenizer.tool_format != "qwen3_coder":
            return self._tokenizer.parse_tool_call(text, tools)
        calls = self._tokenizer.parse_tool_call(text, coder_values.with_strings(tools))
        return [coder_values.read(call, tools) for call in calls]


class _JsonCalls(_OtherCalls):
    """Calls that are JSON objects with name and arguments."""

    is_json = True

    def as_json(self, opening: str, text: str) -> str | None:
        """Return the text."""
        return text


class _MistralCalls(_OtherCalls):
    """Calls with the function's name before the arguments, or older ones that are a JSON list."""

    is_json = True

    def as_json(self, opening: str, text: str) -> str | None:
        """Return name and arguments as one JSON object. Raises ValueError for a list."""
        if header := _MISTRAL.match(text, 0, _MAX_HEADER):
            return named(header[1], text[header.end() :])
        if len(text) > _MAX_HEADER:
            raise ValueError("The text is not a tool call, or it is written as a list.")
        return None


def _check_coder(text: str) -> None:
    """Raise ValueError if mlx-lm's parser would find no call, or search the rest of the text from each of many
    parameters that do not end."""
    open_parameters = text.rpartition("</parameter>")[2]
    searched = open_parameters.count("<parameter=") * len(open_parameters)
    if not text.removesuffix("\n").endswith("</function>") or searched > _MAX_SEARCHED:
        raise ValueError("The text is not a tool call: it has no end, or too many open parameters.")
