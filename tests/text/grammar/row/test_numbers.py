"""No answer in JSON holds a number beyond a double, however its tokens are cut."""

import json
import random
from math import isfinite
from typing import Any

import pytest

from tests.selection import examples
from tests.text.grammar.schema.answers import BYTES
from tests.text.guided import ANY_OBJECT, CLOCK, by, model
from tests.text.structured import allowed
from worker.text.grammar.lark import Grammar
from worker.text.grammar.row.grammar import RowGrammar
from worker.text.grammar.row.reader import FiniteNumbers
from worker.text.grammar.sandbox import compile_grammar

NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}, "required": ["a", "b"]}
END = BYTES.eos_token
MARKER = 300


class Tokens:
    """Tokens of single bytes, and longer ones."""

    def __init__(self, *more: bytes) -> None:
        self._bytes = [*(bytes([byte]) for byte in range(256)), *more]

    def bytes_of(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""


def guard(*more: bytes, begun: bool = True) -> FiniteNumbers:
    return FiniteNumbers(Tokens(*more).bytes_of, 256 + len(more), [MARKER], begun=begun)


def barred(numbers: FiniteNumbers, text: bytes, count: int) -> set[bytes]:
    place = numbers.begins.after(text)
    full = b"\xff" * (count // 8 + 4)
    narrowed = numbers.narrowed(full, place)
    found = {token for token in range(count) if not narrowed[token // 8] >> token % 8 & 1}
    assert found == {token for token in range(count) if not numbers.allows(place, token)}
    return {Tokens(*LONGER).bytes_of(token) for token in found}


LONGER = b"e9", b"e308", b"309", b"1e400", b": 12e999,", b"00", b"7}", b"e-400"
DIGITS = {b"%d" % digit for digit in range(10)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", {b"1e400", b": 12e999,"}),
        (b'{"a": 1', {b"1e400", b": 12e999,"}),
        (b'{"a": 2', {b"1e400", b": 12e999,", b"e308"}),
        (b'{"a": 1e30', {b"1e400", b": 12e999,", b"9", b"309", b"00"}),
        (b'{"a": 1.7e30', {b"1e400", b": 12e999,", b"9", b"309", b"00"}),
        (b'{"a": 1.8e30', {b"1e400", b": 12e999,", b"8", b"9", b"309", b"00"}),
        (b'{"a": 1e+30', {b"1e400", b": 12e999,", b"9", b"309", b"00"}),
        (b'{"a": 1e-30', {b"1e400", b": 12e999,"}),
        (b'{"a": "1e30', set()),
        (b'{"a": "\\"1e30', set()),
        (b'{"a": "\\\\", "b": 1e308', {b"1e400", b": 12e999,", *DIGITS, b"309", b"00", b"7}"}),
        (b"[" + b"1" * 308, {b"1e400", b": 12e999,", b"e9", b"e308", b"309", b"00"}),
        (b"[0." + b"1" * 1000, {b"1e400", b": 12e999,", *DIGITS, b"309", b"00", b"7}", b"e9", b"e308", b"e-400"}),
        (b'["1e400", true', {b"1e400", b": 12e999,"}),
    ],
)
def test_tokens_that_make_a_number_too_large_are_barred(text: bytes, expected: set[bytes]) -> None:
    assert barred(guard(*LONGER), text, 256 + len(LONGER)) == expected


def test_a_mask_of_nothing_else_stays() -> None:
    numbers, (nine,) = guard(), b"9"
    only = bytes(nine // 8) + bytes([1 << nine % 8])
    assert numbers.narrowed(only, numbers.begins.after(b'{"a": 1e30')) == only


def test_what_precedes_the_json_is_free_and_a_marker_begins_anew() -> None:
    numbers = guard(begun=False)
    thought = numbers.begins.after(b'He said "1e30')
    assert numbers.allows(thought, ord("9"))
    assert not numbers.allows(thought.after(b' {"a": 1e30'), ord("9"))
    assert numbers.after(thought.after(b'{"a": "'), MARKER) == numbers.begins


def test_a_walk_that_seeks_large_numbers_finds_none() -> None:
    grammar = Grammar({})
    written = grammar.starting_with(grammar.json(NUMBERS, "response_format"))
    liked = {ord(sign): 60 for sign in "0123456789eE+"} | {ord(","): 9, ord("}"): 9, ord('"'): 9}
    dice, ended = random.Random(0), 0
    for _ in range(examples(200)):
        matchers = (compile_grammar(BYTES, written) for _ in range(2))
        state = RowGrammar(next(matchers), frozenset({END}), drafts=next(matchers), clock=lambda: 0.0, numbers=guard())
        text = bytearray()
        while len(text) < 400:
            may = allowed(state, BYTES.vocab_size)
            if END in may:
                value = json.loads(text)["a"]
                assert isfinite(float(value)), text
                ended += 1
                break
            draft = dice.choices(range(256), [liked.get(byte, 0.01) for byte in range(256)], k=4)
            valid = draft[: state.valid_prefix(draft)]
            masks = state.masks_along(draft)
            assert len(masks) == len(valid) + 1
            for token, mask in zip(valid, masks, strict=False):
                assert mask == state.bitmask()
                state.accept(token)
            state.rollback(len(valid))
            assert may, bytes(text)
            (token,) = dice.choices(may, [liked.get(byte, 1) for byte in may])
            state.accept(token)
            text.append(token)
    assert ended > examples(200) / 4


@pytest.mark.parametrize("format", ["hermes", "mistral", "harmony"])
@pytest.mark.parametrize("fields", [by(NUMBERS), ANY_OBJECT, {"tools": [CLOCK], "tool_choice": "required"}])
async def test_rows_of_every_kind_bar_them(format: str, fields: dict[str, Any]) -> None:
    asked = {**fields}
    if "tools" in asked:
        asked["tools"] = [{"type": "function", "function": {"name": "clock", "parameters": NUMBERS}}]
    state = await model(format).guide(**asked)
    begins = {
        "hermes": '<tool_call>\n{"name": "clock", "arguments": ',
        "mistral": "[TOOL_CALLS]clock[ARGS]",
        "harmony": "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>",
    }
    text = begins[format] if "tools" in asked else "<|channel|>final<|message|>" if format == "harmony" else ""
    for token in model(format).tokenizer.encode(text + '{"a": 1e30'):
        assert token in allowed(state, model(format).count)
        state.accept(token)
    eight, nine = (model(format).tokenizer.encode(digit)[-1] for digit in "89")
    assert {eight, nine} & set(allowed(state, model(format).count)) == {eight}


def test_the_places_of_a_text_do_not_depend_on_how_it_is_cut() -> None:
    dice, begins = random.Random(1), guard(begun=False).begins
    for _ in range(300):
        text = bytes(dice.choices(b'{}[]",:\\0123456789eE+-. atru', k=40))
        cuts = sorted(dice.sample(range(41), 5))
        place = begins
        for begin, end in zip([0, *cuts], [*cuts, 40], strict=True):
            place = place.after(text[begin:end])
        assert place == begins.after(text)
