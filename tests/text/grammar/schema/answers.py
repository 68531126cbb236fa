"""Random answers that the grammar of a schema allows, byte by byte."""

import random
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from worker.text.grammar.lark import Grammar
from worker.text.grammar.row.reader import FiniteNumbers
from worker.text.grammar.sandbox import compile_grammar

Schema = dict[str, Any]
BYTES = LLTokenizer("byte")


_NUMBERS = FiniteNumbers(lambda token: bytes([token]), 256, [], begun=True)
_LIKELY = {ord(sign): 8 for sign in '"}]'} | {ord(","): 2} | dict.fromkeys(range(128, 256), 0.3)


def matcher(schema: Schema) -> LLMatcher:
    """Raises `JobFailure`, and `Uncompilable`."""
    grammar = Grammar({})
    return compile_grammar(BYTES, grammar.starting_with(grammar.json(schema, "response_format")))


def takes(schema: Schema, text: str) -> bool:
    """Return whether all of it is allowed, and may be the end."""
    found, written = matcher(schema), list(text.encode())
    return found.validate_tokens(written) == len(written) and found.consume_tokens(written) and found.is_accepting()


def answer(found: LLMatcher, dice: random.Random, max_bytes: int) -> str | None:
    """Return what it allows, drawn so that it ends soon. None if it did not."""
    found.reset()
    written, place = bytearray(), _NUMBERS.begins
    while len(written) < max_bytes:
        mask = _NUMBERS.narrowed(found.compute_bitmask(), place)
        may = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if found.is_stopped() or not may or (found.is_accepting() and dice.random() < 0.3):
            return written.decode()
        (byte,) = dice.choices(may, [_LIKELY.get(each, 1) for each in may])
        assert found.consume_token(byte)
        written.append(byte)
        place = place.after(bytes([byte]))
    return None


def answers(schema: Schema, count: int, seed: int = 0, max_bytes: int = 400) -> list[str]:
    found, dice = matcher(schema), random.Random(seed)
    return [each for _ in range(count) if (each := answer(found, dice, max_bytes)) is not None]
