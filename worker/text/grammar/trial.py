"""Child process that writes the grammar of a client's constraint and compiles it: see `guide`.

It answers a marshalled question with its verdict. If the grammar does not compile, further answers name the part of the
request that causes it, each more exactly than the one before. The search for that part has a time limit.
"""

import json
import logging
import marshal
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from sluice.contract.events import ErrorType
from worker.errors import JobFailure
from worker.process.frames import FrameLimits, LimitExceeded, Send, handle_frames
from worker.text.grammar.builder import Grammars, Markup, OutputConstraint
from worker.text.grammar.lark import Grammar, literal
from worker.text.grammar.sandbox import TRIAL_LIMITS, Uncompilable, compile_grammar, error_of
from worker.text.grammar.schema.references import NAMED, References, members
from worker.text.grammar.schema.rewrite import names_alone, relaxed
from worker.text.grammar.schema.unsupported import Schema, UnsupportedKeyword
from worker.text.grammar.tool_grammars import ANY_ARGUMENTS, HeldFunction

# Translates errors of llguidance (1.9) about a grammar to sentences for clients.
#
# Its own messages name its options and types, and quote expressions that it generated; they go to the log. If a new
# release changes a message, the client gets a general sentence.

logger = logging.getLogger("sluice.text")

TOO_EXPENSIVE = "it is too large, too deep or too slow to compile."
TOO_MANY_STATES = "its patterns and lengths have too many states; anchor patterns with ^ and $, or count less."
_NOTHING_LEFT = "its keywords contradict each other, so nothing satisfies it; correct them."
_UNKNOWN = "it could not be turned into a grammar; make it simpler."

_CROWDED = "minProperties and maxProperties are not supported with optional properties; make these required."
_OVERLAP = "two of its patternProperties may match one name; write them so that they exclude each other."
_UNDECIDED = "its patterns and lengths take too long to compare; make them simpler."
_CIRCLE = "a reference with further keywords refers back to itself; move these keywords into the definition."
_PROPERTY = "a pattern names a Unicode property that does not exist; correct it."

_SENTENCES = {
    "nsatisfiable": _NOTHING_LEFT,
    "Regex is empty": _NOTHING_LEFT,
    "is greater than": _NOTHING_LEFT,
    "min/maxProperties only": _CROWDED,
    "are not disjoint": _OVERLAP,
    "are disjoint": _UNDECIDED,
    "if regex is empty": _UNDECIDED,
    "circular references": _CIRCLE,
    "Unicode property": _PROPERTY,
    "too many states": TOO_MANY_STATES,
    "too many expressions": TOO_MANY_STATES,
    "too many": TOO_EXPENSIVE,
    "too large": TOO_EXPENSIVE,
    "too big": TOO_EXPENSIVE,
    "too deep": TOO_EXPENSIVE,
    "exceed": TOO_EXPENSIVE,
    "limit": TOO_EXPENSIVE,
    "fuel": TOO_EXPENSIVE,
}


def grammar_error(message: str) -> str:
    """Return the sentence for llguidance's message, and log the message."""
    if message == TOO_EXPENSIVE:
        return message
    logger.info("grammar refused: %s", " ".join(message.split())[:500])
    return next((sentence for part, sentence in _SENTENCES.items() if part in message), _UNKNOWN)


# Tries the strings of a grammar whose cost a client's patterns decide: each from its begin to some hundred characters.
#
# llguidance (1.9) creates the states of its lexer when an answer comes to them. A pattern such as `\\s.{1,60}\\s` has
# so many that the limits are exceeded in the middle of a stream, and one mask of a large vocabulary visits thousands.
# So the trial has a vocabulary of its own: random words of the characters that the patterns tell apart.

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
    tokens = min(24, max(1, 2_000 // len(strings)))  # of each string
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
        count = min(1_500, max(1, 12_000 // len(strings)))  # of each string; llguidance reads 12,000 in 25 ms
        words = dict.fromkeys(
            "".join(dice.choices(characters, k=dice.randint(2, 16)))  # as long as those of real vocabularies
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
        found |= dict.fromkeys([*plain[:6], *others[:1]])
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
    together = 200  # optional properties of an object; a mask takes longer with more
    for batch in range(0, len(found), together):
        begin, properties = f"{len(rules)}:", Schema()
        for schema, first in list(found.values())[batch : batch + together]:
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
    left = 50  # schemas; the trial ignores further ones

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


LIMITS = FrameLimits(cpu_s=2, address_bytes=2 << 30, wall_s=60.0)  # real schemas take 0.2 s, process start included
_SEARCH_CPU_S = 1.0  # CPU time after which no further part is tried


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The grammar, which compiles. `not_held`: what it does not enforce of functions' schemas, a line for each."""

    grammar: str
    not_held: str = ""


@dataclass(frozen=True, slots=True)
class RefusedConstraint:
    """No grammar can be written: the error for the client."""

    type: ErrorType
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class CompileError:
    """The grammar does not compile. `place`: the part of the request, and of its schema, that causes it; empty if
    unknown."""

    message: str  # llguidance's message
    place: str = ""


Verdict = CompiledGrammar | RefusedConstraint | CompileError
_VERDICTS: dict[str, Callable[..., Verdict]] = {
    kind.__name__: kind for kind in (CompiledGrammar, RefusedConstraint, CompileError)
}


def question(markup: Markup, constraint: OutputConstraint, *, has_thought: bool) -> bytes:
    """Return the body of a request to the process: equal bytes for equal arguments."""
    functions = [(function.name, function.parameters, function.strict) for function in constraint.functions]
    asked = constraint.schema, functions, constraint.allows_many, constraint.in_text
    return marshal.dumps((astuple(markup), asked, has_thought), 2)  # this version writes equal values as equal bytes


def verdict_of(answer: list[str]) -> Verdict:
    """Return the verdict that an answer of the process stands for."""
    kind, *fields = answer
    return _VERDICTS[kind](*fields)


def send_verdicts(task: None, question: bytes, send: Send) -> None:
    """Send the verdict on a question, and a better one if there is. Raises `LimitExceeded`."""
    threading.stack_size(4 << 20)  # at most half of the stack of the worker's own threads
    with ThreadPoolExecutor(1) as thread:
        panic = thread.submit(_answer, question, send).exception()
    if panic:
        raise LimitExceeded from panic


def _answer(question: bytes, send: Send) -> None:
    markup, (schema, functions, *more), has_thought = marshal.loads(question)
    constraint = OutputConstraint(schema, tuple(HeldFunction(*each) for each in functions), *more)
    grammars = Grammars(Markup(*markup))
    verdicts, not_held = _verdicts(grammars, constraint, has_thought), list[str]()
    first = next(verdicts)
    if not isinstance(first, CompiledGrammar):
        functions = tuple(_enforceable(grammars, constraint, function, not_held) for function in constraint.functions)
        if functions != constraint.functions:
            verdicts = _verdicts(grammars, replace(constraint, functions=functions), has_thought)
            first = next(verdicts)
    for verdict in chain([first], verdicts):
        if isinstance(verdict, CompiledGrammar):
            verdict = replace(verdict, not_held="\n".join(not_held))
        send([type(verdict).__name__, *astuple(verdict)], b"")


def _verdicts(grammars: Grammars, constraint: OutputConstraint, has_thought: bool) -> Iterator[Verdict]:
    vocabulary = LLTokenizer("byte")
    try:
        text, parts = grammars.grammar_as_text(constraint)
        grammar = grammars.grammar(constraint, has_thought=has_thought, rewritten=parts.schemas)
        _compile(vocabulary, text, parts)
    except JobFailure as refusal:
        yield RefusedConstraint(refusal.type, refusal.message, refusal.param)
    except Uncompilable as error:
        yield CompileError(str(error))
        yield from (CompileError(str(error), place) for place in _places(grammars, vocabulary, constraint))
    else:
        yield CompiledGrammar(grammar)


def _enforceable(
    grammars: Grammars, constraint: OutputConstraint, function: HeldFunction, not_held: list[str]
) -> HeldFunction:
    """Return the function with as much of its schema as can be enforced, and add what is left out to `not_held`. Of a
    strict one that is unknown formats alone."""
    if function.parameters in (None, ANY_ARGUMENTS) or (function.strict and _search_ended()):
        return function
    wrong = "" if function.strict else _wrong(grammars, constraint, function)
    if not (wrong or function.strict):
        return function
    with suppress(UnsupportedKeyword):
        schema, left_out = relaxed(function.parameters or {}, strict=function.strict)
        looser = replace(function, parameters=schema)
        if function.strict or not _wrong(grammars, constraint, looser):
            not_held += [f"tools: {function.name}: {each}." for each in left_out]
            return looser
    if function.strict:
        return function
    not_held.append(f"{wrong} Its arguments are not held.")
    looser = replace(function, parameters=names_alone(function.parameters or {}))
    if constraint.in_text or _wrong(grammars, constraint, looser):
        return replace(function, parameters=ANY_ARGUMENTS)
    return looser


def _wrong(grammars: Grammars, constraint: OutputConstraint, function: HeldFunction) -> str:
    """Return why a function's schema cannot be enforced; empty if it can be. After the time for searches, none can."""
    place = f"tools: {function.name}"
    if _search_ended():
        return f"{place}: {TOO_EXPENSIVE}"
    alone = replace(constraint, schema=None, functions=(function,))
    try:
        _compile(LLTokenizer("byte"), *grammars.grammar_as_text(alone))
    except JobFailure as refusal:
        return refusal.message
    except Uncompilable as error:
        return f"{place}: this schema cannot be enforced: {grammar_error(str(error))}"
    return ""


def _compile(vocabulary: LLTokenizer, grammar: str, parts: Grammar) -> None:
    """Compile a grammar, and try it. Raises `Uncompilable`."""
    compile_grammar(vocabulary, grammar)
    try_strings(parts)


def _places(grammars: Grammars, vocabulary: LLTokenizer, constraint: OutputConstraint) -> Iterator[str]:
    """Yield the part of the request that does not compile, then the places in its schema, each within the one before
    it, that do not compile alone for the same reason."""
    for place, part in constraint.parts():
        if _search_ended():
            return
        try:
            _compile(vocabulary, *grammars.grammar_as_text(part))
        except Uncompilable as error:
            yield place
            schema = part.schema if part.schema is not None else part.functions[0].parameters
            within = _places_within(schema or {}, vocabulary, grammar_error(str(error)))
            yield from (f"{place}: {pointer}" for pointer in within)
            return


def _places_within(root: Schema, vocabulary: LLTokenizer, reason: str) -> Iterator[str]:
    references, seen = References(root), set[str]()

    def is_wrong(pointer: str, member: Schema) -> bool:
        if pointer in seen or _search_ended():
            return False
        seen.add(pointer)
        return _reason(member, root, vocabulary) == reason

    found: tuple[str, Schema] | None = ("#", root)
    while found is not None:
        at, schema = found
        found = next((each for each in members(schema, at, references) if is_wrong(*each)), None)
        if found is not None:
            yield found[0]


def _reason(schema: Schema, root: Schema, vocabulary: LLTokenizer) -> str | None:
    """Return why a part of a schema does not compile alone, or None."""
    grammar = Grammar({})
    try:
        _compile(vocabulary, grammar.starting_with(grammar.json(schema, "", root)), grammar)
    except JobFailure:
        return None
    except Uncompilable as error:
        return grammar_error(str(error))
    return None


def _search_ended() -> bool:
    return time.process_time() > _SEARCH_CPU_S


if __name__ == "__main__":
    handle_frames(send_verdicts)
