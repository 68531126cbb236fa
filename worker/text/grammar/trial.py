"""Tries the strings of a grammar whose cost a client's patterns decide: each from its begin to some hundred characters.

llguidance (1.9) creates the states of its lexer when an answer comes to them. A pattern such as `\\s.{1,60}\\s` has so
many that the limits are exceeded in the middle of a stream, and one mask of a large vocabulary visits thousands. So the
trial has a vocabulary of its own: random words of the characters that the patterns tell apart.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from worker.errors import JobFailure
from worker.text.grammar.errors import TOO_EXPENSIVE
from worker.text.grammar.lark import Grammar, literal
from worker.text.grammar.sandbox import TRIAL_LIMITS, Uncompilable, error_of
from worker.text.grammar.schema.references import NAMED
from worker.text.grammar.schema.unsupported import Schema

_WORDS = 12_000  # of the vocabulary, for all strings together; llguidance reads them in 25 ms
_MOST_WORDS = 1_500  # of one string
_WORD_CHARACTERS = 16  # the longest words of real vocabularies have about as many
_TOKENS = 2_000  # of all strings together
_MOST_TOKENS = 24  # of one string
_CHARACTERS_OF_A_CLASS = 6
_STRINGS_IN_AN_OBJECT = 200  # optional properties; a mask takes longer with more
_MAX_PARTS = 50  # schemas of one string; the trial ignores further ones
_OF_STRINGS = ("type", "pattern", "minLength", "maxLength", "format")
_CLASS = re.compile(r"\[([^\]]*)\]")
_END_OF_RANGE = re.compile(r"\\x\{([0-9A-F]+)\}|([A-Za-z0-9])")
_NULL: Schema = {"type": "null"}


@dataclass(frozen=True, slots=True)
class _String:
    """A string that is tried. `begin`: the text before its first character. `patterns`: the expressions that decide."""

    begin: str
    patterns: tuple[str, ...]


def try_strings(grammar: Grammar) -> None:
    """Write random beginnings of each string that has a pattern, and of the names that have one. Raises `Uncompilable`
    if one exceeds llguidance's limits. Takes CPU time within a bound."""
    trial, rules = Grammar({}), list[str]()
    strings = [*_texts(grammar, trial, rules), *_json_strings(grammar, trial, rules)]
    if not strings:
        return
    try:
        written = trial.starting_with(f"({' | '.join(rules)})")
    except JobFailure as error:
        raise Uncompilable(TOO_EXPENSIVE) from error
    vocabulary = _Vocabulary([each.patterns for each in strings])
    matcher = LLMatcher(vocabulary.read(), written, log_level=0, limits=TRIAL_LIMITS)
    tokens = min(_MOST_TOKENS, max(1, _TOKENS // len(strings)))
    for each in strings:
        if not matcher.is_error():
            matcher.reset()
            _write(matcher, vocabulary, each.begin.encode(), tokens)
    if wrong := error_of(matcher):
        raise Uncompilable(wrong)


def _write(matcher: LLMatcher, vocabulary: "_Vocabulary", begin: bytes, count: int) -> None:
    if matcher.try_consume_tokens([*begin]) < len(begin):
        return  # nothing satisfies it, which matters only if the whole grammar cannot do without it
    dice = random.Random(0)
    for _ in range(count):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            return
        matcher.consume_token(vocabulary.drawn(mask, dice))


class _Vocabulary:
    """Bytes, which are the tokens 0 to 255, an end, and random words of the characters that patterns tell apart."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __init__(self, strings: list[tuple[str, ...]]) -> None:
        dice = random.Random(0)
        count = min(_MOST_WORDS, max(1, _WORDS // len(strings)))
        words = dict.fromkeys(
            "".join(dice.choices(characters, k=dice.randint(2, _WORD_CHARACTERS)))
            for characters in dict.fromkeys(map(_characters, strings))
            for _ in range(count)
        )
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *map(str.encode, words)]

    def __call__(self, text: bytes | str) -> list[int]:
        return [*(text.encode() if isinstance(text, str) else text)]

    def read(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens))

    def drawn(self, mask: bytes, dice: random.Random) -> int:
        """Return one of the tokens that the mask allows, a word if there is one."""
        allowed = int.from_bytes(mask, "little")
        words = allowed >> 257
        if words:
            return 257 + _one_of(words, dice)
        return _one_of(allowed, dice)


def _one_of(bits: int, dice: random.Random) -> int:
    """Return the place of a bit that is set: the first one from a random place on."""
    begin = dice.randrange(bits.bit_length())
    later = bits >> begin
    return begin + (later & -later).bit_length() - 1


def _characters(patterns: tuple[str, ...]) -> str:
    """Return characters of each class in the expressions: both ends of some of its ranges."""
    found = dict.fromkeys("a ")
    for text in dict.fromkeys(text for pattern in patterns for text in _CLASS.findall(pattern)):
        ends = [chr(int(code, 16)) if code else letter for code, letter in _END_OF_RANGE.findall(text[:2_000])]
        plain = [each for each in ends if " " <= each <= "~" and each not in '"\\']
        others = [each for each in ends if each > "~" and each.isprintable()]
        found |= dict.fromkeys([*plain[:_CHARACTERS_OF_A_CLASS], *others[:1]])
    return "".join(found)


def _texts(grammar: Grammar, trial: Grammar, rules: list[str]) -> Iterator[_String]:
    """Yield the texts of a grammar that are no JSON, parameters between tags, and add rules for them."""
    for terminal, until in dict.fromkeys(grammar.texts):
        begin = f"{len(rules)}:"
        rules.append(f"{literal(begin)} {trial.text(terminal, until)}")
        yield _String(begin, (terminal,))


def _json_strings(grammar: Grammar, trial: Grammar, rules: list[str]) -> Iterator[_String]:
    """Yield the strings of JSON, and add rules for objects that have them as optional properties: there, one that
    nothing satisfies does no harm."""
    found = {
        json.dumps(schema): (schema, begin)
        for whole in grammar.schemas
        for value in _values(whole["json_schema"])
        for schema, begin in ((_string(value, whole["json_schema"].get("$defs", {})), '"'), (_object(value), '{"'))
        if schema is not None
    }
    for batch in range(0, len(found), _STRINGS_IN_AN_OBJECT):
        begin, properties = f"{len(rules)}:", Schema()
        for schema, first in list(found.values())[batch : batch + _STRINGS_IN_AN_OBJECT]:
            name = str(len(properties))
            properties[name] = schema
            yield _String(f'{begin}{{"{name}":{first}', tuple(_patterns(schema)))
        whole = {"type": "object", "properties": properties, "additionalProperties": False}
        rules.append(f"{literal(begin)} {trial.rewritten(whole)}")


def _values(root: Schema) -> Iterator[Schema]:
    """Yield the schemas of whole values: not those of an `allOf` or `anyOf`, which say only a part."""
    waiting: list[tuple[Any, bool]] = [(root, True)]
    while waiting:
        schema, whole = waiting.pop()
        if not isinstance(schema, dict):
            continue
        if whole:
            yield schema
        for keyword, value in schema.items():
            if keyword in NAMED and isinstance(value, dict):
                waiting += [(each, True) for each in value.values()]
            elif keyword in ("items", "additionalProperties"):
                waiting.append((value, True))
            elif keyword in ("allOf", "anyOf", "prefixItems"):
                waiting += [(each, keyword == "prefixItems") for each in value]


def _string(schema: Schema, definitions: Schema) -> Schema | None:
    """Return what a value's schema requires of a string; None if it has no pattern."""
    left = _MAX_PARTS

    def part(schema: Any) -> Any:
        nonlocal left
        left -= 1
        if not isinstance(schema, dict) or left < 0:
            return schema is not False
        found = {keyword: schema[keyword] for keyword in _OF_STRINGS if keyword in schema}
        for keyword in ("allOf", "anyOf"):
            if keyword in schema:
                found[keyword] = [part(each) for each in schema[keyword]]
        if "$ref" in schema:
            target = part(definitions.get(schema["$ref"].rpartition("/")[2], True))
            found["allOf"] = [*found.get("allOf", []), target]
        return found

    if schema.keys() & {"enum", "const"}:
        return None
    found = part(schema)
    return {"allOf": [found, {"type": "string"}]} if any(_patterns(found)) else None


def _object(schema: Schema) -> Schema | None:
    """Return the schema of an object with the same names; None if no pattern decides about them."""
    if not schema.get("patternProperties"):
        return None
    return {
        "type": "object",
        "properties": dict.fromkeys(schema.get("properties", {}), _NULL),
        "patternProperties": dict.fromkeys(schema["patternProperties"], _NULL),
        "additionalProperties": False if schema.get("additionalProperties") is False else _NULL,
    }


def _patterns(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case dict() as found:
                yield from found.get("patternProperties", ())
                if "pattern" in found:
                    yield found["pattern"]
                waiting += found.get("allOf", []) + found.get("anyOf", [])
