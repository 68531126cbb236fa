"""Strings whose patterns exceed the limits of llguidance in the middle of a stream are found before it."""

import json
import random
import time
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tests.text.dialects.reading import BY_NAME
from tests.text.grammar.schema.answers import Schema
from worker.text.grammar.lark import Grammar
from worker.text.grammar.sandbox import Uncompilable, compile_grammar, error_of
from worker.text.grammar.tool_grammars import HeldFunction, tool_calls
from worker.text.grammar.trial import try_strings

WORDS = r"^$|(^(?:\S+\s+){0,99}\S+$)"


def string(pattern: str, **more: Any) -> Schema:
    return {"type": "string", "pattern": pattern, **more}


def closed(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


HELD: dict[str, Schema] = {
    "words behind a const": closed(kind={"const": "x" * 40}, text=string(WORDS)),
    "a name of a length": {"type": "object", "patternProperties": {"[a-zA-Z0-9_-]{1,255}": {"type": "string"}}},
    "many words": closed(**{f"p{i}": string(rf"\w{{1,{16 + i}}}") for i in range(60)}),
    "a password": string("^.*[a-z]", allOf=[{"pattern": each} for each in ("[0-9]", "[A-Z]", r"\W")], maxLength=128),
    "words in any order": string(r"^(\S*\s*){0,99}$"),
    "a host name": string(r"^(([a-z0-9]|[a-z0-9][a-z0-9-]{0,61}[a-z0-9])\.)*([a-z]|[a-z][a-z-]{0,61}[a-z])$"),
    "nothing in one branch": {"anyOf": [string("^a$", minLength=2), {"type": "null"}]},
    "a definition": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [string("^a+$"), {"maxLength": 5}]}}},
}
TOO_MANY_STATES: dict[str, Schema] = {
    "two spaces": string(r"\s.{1,60}\s"),
    "x before y": string("x.{100}y"),
    "behind a const": closed(kind={"const": "x" * 40}, text=string(r"\s.{1,60}\s")),
    "in a list": {"type": "array", "items": {"type": ["string", "null"], "pattern": r"\s.{1,60}\s"}},
    "by two keywords": {"type": "array", "items": {"type": "string", "allOf": [{"$ref": "#/$defs/a"}]},
                        "$defs": {"a": {"pattern": r"\s.{1,60}\s"}}},
    "a name": {"type": "object", "patternProperties": {r"\s.{1,60}\s": {}}, "additionalProperties": False},
    "of many strings": closed(**{f"p{i}": string(rf"^{i}.*a.{{8}}b$") for i in range(200)}),
}  # fmt: skip


def written(schema: Schema) -> tuple[str, Grammar]:
    grammar = Grammar({})
    return grammar.starting_with(grammar.json(schema, "response_format")), grammar


class Words:
    """Bytes, an end, and words of letters, digits and spaces, as many as a small vocabulary has."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)

    def __init__(self) -> None:
        dice = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyzABCXYZ0123456789_-  "
        words = dict.fromkeys("".join(dice.choices(letters, k=dice.randint(2, 14))) for _ in range(30_000))
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *map(str.encode, words)]

    def __call__(self, text: bytes | str) -> list[int]:
        return [*(text.encode() if isinstance(text, str) else text)]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    words = Words()
    return LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens))


def stream(found: LLMatcher, dice: random.Random, tokens: int) -> str | None:
    """Return the error of a random answer, or None."""
    for _ in range(tokens):
        mask = found.compute_bitmask()
        if found.is_error() or found.is_stopped():
            break
        bits = int.from_bytes(mask, "little")
        begin = dice.randrange(bits.bit_length())
        later = bits >> begin
        assert found.consume_token(begin + (later & -later).bit_length() - 1)
    return error_of(found)


@pytest.mark.parametrize("name", HELD)
def test_what_the_trial_accepts_does_not_end_a_stream(name: str, vocabulary: LLTokenizer) -> None:
    text, grammar = written(HELD[name])
    try_strings(grammar)
    found = compile_grammar(vocabulary, text)
    for seed in range(4):
        found.reset()
        assert stream(found, random.Random(seed), 200) is None


@pytest.mark.parametrize("name", TOO_MANY_STATES)
def test_a_string_of_too_many_states_is_found_wherever_it_stands(name: str) -> None:
    text, grammar = written(TOO_MANY_STATES[name])
    compile_grammar(LLTokenizer("byte"), text)
    with pytest.raises(Uncompilable):
        try_strings(grammar)


@pytest.mark.parametrize("more", [{"maxLength": 100_000}, {}], ids=["up to a length", "of any length"])
def test_a_long_string_does_not_end_a_stream(more: Schema, vocabulary: LLTokenizer) -> None:
    found, dice = compile_grammar(vocabulary, written({"type": "string", **more})[0]), random.Random(0)
    assert found.consume_token(ord('"'))
    left = 8_000 if more else 20_000
    while left > 0:
        found.compute_bitmask()
        token = dice.randrange(257, vocabulary.vocab_size)
        left -= len(vocabulary.decode_bytes([token]))
        assert found.consume_token(token)
        assert error_of(found) is None


def test_a_parameter_between_tags_is_tried_too() -> None:
    for pattern, fine in ((r"^\s+$", True), (r"\s.{1,60}\s", False)):
        grammar, parameters = Grammar({}), closed(text=string(pattern))
        grammar.starting_with(tool_calls(BY_NAME["qwen3_coder"], grammar, [HeldFunction("f", parameters)], False))
        if fine:
            try_strings(grammar)
        else:
            with pytest.raises(Uncompilable):
                try_strings(grammar)


@pytest.mark.timing
def test_a_trial_of_many_strings_is_bounded() -> None:
    schema = closed(**{f"p{i}": string(rf"^x{i}[a-z]{{1,{i + 3}}}$", title="x" * 100) for i in range(2_000)})
    _, grammar = written(json.loads(json.dumps(schema)))
    begun = time.process_time()
    try_strings(grammar)
    assert time.process_time() - begun < 3  # it takes 1.0 alone
