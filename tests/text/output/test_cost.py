"""Long answers do not block the event loop."""

import time

import pytest

from tests.text import speech
from tests.text.speech import TOOLS, Model

JSON, CODER = speech.model(), speech.model("qwen3_coder")
LONG = 400_000  # characters
ANSWERS: dict[str, tuple[Model, str]] = {
    "blanks": (JSON, "a" + " \n" * (LONG // 2)),
    "a long number": (JSON, '<tool_call>{"name": "now", "arguments": {"a": ' + "1" * LONG),
    "a long name before arguments": (
        JSON, '<tool_call>{"name": "' + "a" * (LONG // 2) + '", "arguments": {"a": "' + "b" * (LONG // 2),
    ),
    "parameters that do not end": (
        CODER, "<tool_call><function=now>" + "<parameter=a>" * (LONG // 13) + "</function></tool_call>",
    ),
    **{
        f"beginnings of {name}": (speech.model(name), start + piece * (LONG // len(piece)) + end)
        for name, start, piece, end in (
            ("function_gemma", "<start_function_call>", "call:a{", "<end_function_call>"),
            ("gemma4", "<|tool_call>", "call:a{", "<tool_call|>"),
            ("kimi_k3", "<|open|>tools<|sep|>", "<|open|>call", "<|close|>tools<|sep|>"),
            ("muse_spark", "<atem:function_calls>", "<atem:invoke", "</atem:function_calls>"),
            ("glm", "<tool_call>a", "<arg_key>a</arg_key><arg_value>", "</tool_call>"),
            ("qwen3_coder", "<tool_call><function=a><parameter=a>", "<tool_call><function=a>", "</tool_call>"),
            ("qwen3_coder ends", "<tool_call><function=a><parameter=a>", "</parameter>", ""),
            ("hermes", "", "<tool_call>{", ""),
            ("lfm2", "<|tool_call_start|>[", "a(b=[", ""),
        )
        for name in [name.partition(" ")[0]]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_long_answer_costs_no_more_a_token_than_a_short_one(name: str) -> None:
    speaker, text = ANSWERS[name]
    output = speech.output(speaker, tools=TOOLS)
    output._detokenizer = Pieces(text)
    began = time.process_time()
    for place in range(0, len(text), 8):
        output.feed(place)
    assert time.process_time() - began < 3


class Pieces:
    """A detokenizer whose tokens are places in a text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def feed(self, token: int) -> str:
        return self._text[token : token + 8]

    def flush(self) -> str:
        return ""
