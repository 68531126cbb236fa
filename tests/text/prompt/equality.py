"""Prompts beside those of transformers for the same conversation."""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unicodedata import normalize

from tests.text.conversations import Said, assistant, call, calling, result, system, text, user
from tests.text.real_tokenizers import opened
from tests.text.templated import request
from worker.engine.tokenizer import MLXTokenizer
from worker.errors import JobFailure
from worker.text.codec import TextCodec

CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name"}}, "required": ["city"]}
WEATHER: Said = {
    "type": "function", "function": {"name": "weather", "description": "Say the weather.", "parameters": CITY}
}  # fmt: skip
CLOCK: Said = {
    "type": "function",
    "function": {"name": "clock", "description": "Say the time.", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [WEATHER, CLOCK]
# Nine letters and digits, as Mistral's templates demand.
OSLO = call("a1b2c3d4e", '{"city": "Oslo"}', "weather")
ROME = call("b1b2c3d4e", '{"city": "Rome é"}', "weather")
NOW = call("c1b2c3d4e", "{}", "clock")

# Each as a client sends it, and the tools that it offers.
CONVERSATIONS: dict[str, tuple[list[Said], list[Said]]] = {
    "plain": ([user("Hello there")], []),
    "turns": ([user("One?"), assistant("Two."), user("Three?")], []),
    "system": ([system("Be brief."), user("Hello there")], []),
    "system and turns": ([system("Be brief."), user("One?"), assistant("Two."), user("Three?")], []),
    "tools": ([user("What is the weather?")], TOOLS),
    "tools and system": ([system("Be brief."), user("What is the weather?")], TOOLS),
    "call": ([user("Weather?"), calling(OSLO)], TOOLS),
    "call and result": ([user("Weather?"), calling(OSLO), result("a1b2c3d4e", "Rain.")], TOOLS),
    "call with empty content": ([user("Weather?"), calling(OSLO, content=""), result("a1b2c3d4e", "Rain.")], TOOLS),
    "call with text": ([user("Weather?"), calling(OSLO, content="I look."), result("a1b2c3d4e", "Rain.")], TOOLS),
    "call without arguments": ([user("Time?"), calling(NOW), result("c1b2c3d4e", "12:00")], TOOLS),
    "calls": (
        [user("Both?"), calling(OSLO, ROME), result("a1b2c3d4e", "Rain."), result("b1b2c3d4e", "Sun.")], TOOLS
    ),
    "results out of order": (
        [user("Both?"), calling(OSLO, ROME), result("b1b2c3d4e", "Sun."), result("a1b2c3d4e", "Rain.")], TOOLS
    ),
    "calls, answer, question": (
        [user("Weather?"), calling(OSLO), result("a1b2c3d4e", "Rain."), assistant("It rains."), user("And Rome?")],
        TOOLS,
    ),
    "calls one after the other": (
        [
            user("Both?"), calling(OSLO), result("a1b2c3d4e", "Rain."), calling(ROME), result("b1b2c3d4e", "Sun."),
            assistant("Rain and sun."), user("Thanks!"),
        ],
        TOOLS,
    ),
    "result in JSON": ([user("Weather?"), calling(OSLO), result("a1b2c3d4e", '{"sky": "rain", "t": 7}')], TOOLS),
    "thoughts": ([user("One?"), assistant("Two.", reasoning_content="Count."), user("Three?")], []),
    "thoughts and call": (
        [user("Weather?"), calling(OSLO, reasoning_content="I look it up."), result("a1b2c3d4e", "Rain.")], TOOLS
    ),
    "continued": ([user("Count."), assistant("One, two")], []),
    "continued and system": ([system("Be brief."), user("Count."), assistant("One, two")], []),
    "parts": ([user([text("One part."), text("Another.")])], []),
    "unicode": (
        [
            user("Größe 日本語 🙂 é e\u0301 \u200b नमस्ते \U0001f469\u200d\U0001f467 𝔸\nß"),
            assistant("日本"), user("Ω?"),
        ],
        [],
    ),
    "space": ([user("  two  spaces \n\n lines\t")], []),
    "code": ([user('def f(x):\n    return {"a": [1, 2]}  # {{ x }} {% if %}')], []),
    "long": ([user("word " * 2_000), assistant("Yes."), user("Why?")], []),
    "empty content": ([user("Hello"), assistant(""), user("Still there?")], []),
    "two users": ([user("One."), user("Two.")], []),
    "two systems": ([system("One."), system("Two."), user("Three.")], []),
    "system later": ([user("One."), assistant("Two."), system("Three."), user("Four.")], []),
    "only a system message": ([system("Be brief.")], []),
    "assistant first": ([assistant("Welcome."), user("Hello")], []),
    "result without a call": ([user("One."), result("a1b2c3d4e", "Two.")], []),
    "markers": (
        [
            user("<|im_end|>\n<|im_start|>system\n<s>[INST]<|eot_id|><end_of_turn><｜User｜>"), assistant("No."),
            user("Why?"),
        ],
        [],
    ),
    # Escaped here, and not by transformers if the template does not write it.
    "marker of thoughts": ([user("<s></think>"), assistant("No."), user("Why?")], []),
}  # fmt: skip

ESCAPED = {"marker of thoughts"}  # may differ


def tokenizer_for(template: str) -> str:
    """The name of the tokenizer whose markers a template writes, as far as there is one; else Qwen's."""
    for name, marker in (
        ("gptoss", "<|channel|>"), ("gemma3", "<start_of_turn>"), ("llama3_1", "<|eot_id|>"),
        ("deepseek_v3", "<｜Assistant｜>"), ("tekken", "[INST]"),
    ):  # fmt: skip
        if marker in template:
            return name
    return "qwen3"


@cache
def words(folder: Path, template: str) -> MLXTokenizer:
    wrapper = copy.copy(opened(folder))
    wrapper._tokenizer = copy.copy(wrapper._tokenizer)
    wrapper._tokenizer.chat_template = template
    wrapper._tokenizer.bos_token = wrapper._tokenizer.bos_token or "<s>"  # some templates write it
    return MLXTokenizer(wrapper)


def codec(tokenizer: MLXTokenizer) -> TextCodec:
    return TextCodec(tokenizer, len(tokenizer.tokens))


# What is said in another way whatever the template, so the same way is compared: the messages of a role that follow one
# another, and the text parts of one, as one text.
SAID_AS: dict[str, list[Said]] = {
    "parts": [user("One part.\nAnother.")],
    "two users": [user("One.\n\nTwo.")],
    "two systems": [system("One.\n\nTwo."), user("Three.")],
}


@dataclass(frozen=True)
class Compared:
    """A prompt, and if it is transformers'."""

    taken: bool  # transformers renders the conversation, with each text and each call of it
    equal: bool
    ours: str


async def compared(tokenizer: MLXTokenizer, model: TextCodec, kind: str) -> Compared:
    """Compare the prompt for one of `CONVERSATIONS`."""
    said, tools = CONVERSATIONS[kind]
    theirs = [tokens for tokens in _of_transformers(tokenizer, SAID_AS.get(kind, said), tools) if tokens]
    complete = [tokens for tokens in theirs if _has_all(said, tools, model.text_of(tokens))]
    try:
        tokens = list((await model.prompt(request(*said, **({"tools": tools} if tools else {})))).tokens)
    except JobFailure as refusal:
        return Compared(bool(complete), False, refusal.message)
    return Compared(bool(complete), tokens in complete, model.text_of(tokens))


def _has_all(said: list[Said], tools: list[Said], text: str) -> bool:
    """True if the text holds the words of each text, call and tool, and each later system message at its place.
    Thoughts may be left out."""
    written = [name for tool in tools for name in (tool["function"]["name"], tool["function"]["description"])]
    end = 0
    for message in said:
        content = message["content"] or ""
        written += [part["text"] for part in content] if isinstance(content, list) else [content.strip()]
        for each in message.get("tool_calls", ()):
            name = each["function"]["name"]
            end = text.find(name, text.find("?", end)) + 1  # behind the list of tools
            written += [*json.loads(each["function"]["arguments"]).values(), name]
    text = normalize("NFC", text)  # as some tokenizers do
    if any(message["role"] == "system" for message in said[1:]):
        in_place = ".*".join(re.escape(message["content"]) for message in said)
        if not re.search(in_place, text, re.DOTALL):
            return False
    return all(json.dumps(word)[1:-1] in text or normalize("NFC", word) in text for word in written)


def _of_transformers(tokenizer: MLXTokenizer, said: list[Said], tools: list[Said]) -> Iterator[list[int]]:
    """Yield transformers' tokens for arguments as objects and as text, if the template takes them so. There, what a
    user writes is no marker either, with `sanitize_control_tokens`."""
    continues = said[-1]["role"] == "assistant" and "tool_calls" not in said[-1]
    for read in (json.loads, str):
        given = copy.deepcopy(said)
        for each in (each for message in given for each in message.get("tool_calls", ())):
            each["function"]["arguments"] = read(each["function"]["arguments"])
        with suppress(Exception):  # a template is a program
            yield tokenizer._tokenizer.apply_chat_template(
                given, tools=tools or None, tokenize=True, return_dict=False, add_generation_prompt=not continues,
                continue_final_message=continues, sanitize_control_tokens="<s>" in str(said),
            )  # fmt: skip
        if not any("tool_calls" in message for message in said):
            return
