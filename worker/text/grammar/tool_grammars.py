"""Grammars of tool calls, one for each class of dialect. The dialect's own reader reads the calls."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from worker.errors import JobFailure
from worker.text.dialects.dialect import CALL_ID, Dialect
from worker.text.dialects.json_calls import HeaderCalls, JsonCalls
from worker.text.dialects.pythonic import GemmaCalls, PythonicCalls
from worker.text.dialects.table import by_name
from worker.text.dialects.tag_calls import TagCalls, tag
from worker.text.grammar.lark import Grammar, literal, spaced
from worker.text.grammar.native_values import NativeValues, NotNative, any_of
from worker.text.grammar.schema.unsupported import Schema
from worker.text.grammar.tag_values import TagParameters
from worker.text.output.harmony import RECIPIENT, HarmonyCalls


@dataclass(frozen=True, slots=True)
class HeldFunction:
    """A function that a request offers."""

    name: str
    parameters: Schema | None = None
    strict: bool = True  # its calls must satisfy the schema; else what of it cannot be enforced is left out


ANY_ARGUMENTS: Schema = {"type": "object", "additionalProperties": True}  # parameters of a function with free arguments

_ANNOTATIONS = {"type", "title", "description", "$schema"}
_INDEX = "[0-9]{1,3}"
_GAP = r"/\n{0,2}/"  # between tags and between calls: templates of one dialect differ in it
_ANY_TEXT = "/(?s:.*)/"
# Free text after a call, which may begin within the call's last token. Another bracket would be a mistake in the call.
_TEXT_AFTER = r"/[^\])}>](?s:.*)/"


HARMONY = HarmonyCalls()

AnyDialect = Dialect | HarmonyCalls


def dialect_named(name: str | None) -> AnyDialect | None:
    """Return the dialect of this name, harmony's included; None if there is none."""
    return HARMONY if name == HARMONY.name else by_name(name)


def texts_of(dialect: AnyDialect | None) -> tuple[str, ...]:
    """Return the texts that grammars of a dialect use, and in which tokens may occur."""
    values: Any = dialect  # all are dataclasses, which a protocol cannot ask for
    return tuple(_texts(astuple(values))) if dialect else ()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def in_json(dialect: AnyDialect | None) -> bool:
    """Return True if a dialect's calls are JSON between markers."""
    return dialect is None or isinstance(dialect, JsonCalls | HeaderCalls | HarmonyCalls)


def tool_calls(
    dialect: AnyDialect, grammar: Grammar, functions: Sequence[HeldFunction], many: bool, opened: str = ""
) -> str:
    """Return the rule for a call of one of the functions, or for several calls if `many`. `opened`: the opening of the
    first call, if the prompt has it. Raises `JobFailure`."""
    if isinstance(dialect, HarmonyCalls):
        return harmony(grammar, functions)
    calls = _CallGrammar(grammar, functions, many, opened).of(dialect)
    return calls if opened else grammar.rule(f"{_GAP} {calls}")


def calls_in_text(dialect: AnyDialect, grammar: Grammar, functions: Sequence[HeldFunction], many: bool) -> str:
    """Return the rule for a call from its opening to its end, within text that is free before and after: a section with
    several calls only if one opening begins it. What follows the name of a function with `ANY_ARGUMENTS` is free, too,
    unless it is JSON. Raises `JobFailure`."""
    if isinstance(dialect, HarmonyCalls):
        rule = harmony_in_text(grammar, functions)
    else:
        rule = _CallGrammar(grammar, functions, many, in_text=True).of(dialect)
    return grammar.rule(f"{rule} {grammar.terminal(_TEXT_AFTER)}?")


class _CallGrammar:
    """The grammar of the calls of one request."""

    def __init__(
        self,
        grammar: Grammar,
        functions: Sequence[HeldFunction],
        many: bool,
        opened: str = "",
        *,
        in_text: bool = False,
    ) -> None:
        """`in_text`: see `calls_in_text`."""
        self._grammar, self._functions = grammar, functions
        self._many, self._opened = many, opened
        self._in_text = in_text
        self._arguments = dict[str, str]()  # rules for arguments in JSON, by the function's name

    def of(self, dialect: Dialect) -> str:
        """Return the rule for calls in a dialect."""
        match dialect:
            case JsonCalls():
                return self.json(dialect)
            case HeaderCalls():
                return self.headers(dialect)
            case TagCalls():
                return self.tags(dialect)
            case PythonicCalls():
                return self.pythonic(dialect)
            case GemmaCalls():
                return self.gemma(dialect)
        raise TypeError(f"no grammar is written for {type(dialect).__name__}.")

    def _repeated(self, call: str, between: str) -> str:
        """Return the rule for a call, or for several if the request allows them."""
        return self._grammar.rule(f"{call} ({between} {call})*" if self._many else call)

    def _each_opened(self, call: str, between: str) -> str:
        """Return the rule for calls that have an opening each, so that in text each of them begins anew."""
        return call if self._in_text else self._repeated(call, between)

    def _named(self) -> tuple[list[HeldFunction], list[HeldFunction]]:
        """Return the functions whose arguments are held, and in text those that are free after the name."""
        free = [each for each in self._functions if self._in_text and each.parameters == ANY_ARGUMENTS]
        return [each for each in self._functions if each not in free], free

    def _then_free(self, before: Sequence[str], between: str, heads: Sequence[str]) -> str:
        """Return the rule for the head of a call whose rest is free, perhaps after other calls. There must be heads."""
        others = f"({any_of(before)} {between})*" if before and self._many else ""
        return self._grammar.rule(f"{others} {any_of(heads)} {self._grammar.terminal(_ANY_TEXT)}")

    def json(self, dialect: JsonCalls) -> str:
        r"""Return the rule for objects between markers, in a list or one after the other.

        <tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>
        """
        call = self._objects(dialect, self._functions)
        begins, ends = self._grammar.marker(dialect.openings[0]), self._grammar.marker(dialect.closing)
        if self._in_text and len(dialect.openings) > 1:
            begins = any_of([self._grammar.marker(each) for each in dialect.openings])
        if dialect.is_list:
            objects = f"({self._listed(call)} | {self._repeated(call, '')})"
            more = f" | {call}" if self._in_text and not dialect.closing else ""
            return self._grammar.rule(f"{begins} {objects} {ends}{more}")
        if dialect.bare and not dialect.closing:
            calls = self._each_opened(call, f"{literal(dialect.between.strip())}")
            listed = f" | {self._listed(call)}" if self._in_text else ""
            return self._grammar.rule(f"({begins})? ({calls}{listed})")
        marked = self._each_opened(self._grammar.rule(f"{begins} {call} {ends}"), _GAP)
        # In text objects without a marker are calls too, at the beginning or after others.
        is_bare = self._in_text and (dialect.bare or not dialect.closing)
        return self._grammar.rule(f"{marked} | {call}") if is_bare else marked

    def _listed(self, call: str) -> str:
        opens, closes = spaced(r" \["), spaced(r"\] ")
        return self._grammar.rule(f"{opens} {self._repeated(call, '/,/')} {closes}")

    def _objects(self, dialect: JsonCalls, functions: Sequence[HeldFunction]) -> str:
        return self._grammar.rule(any_of([self._object(dialect, function) for function in functions]))

    def _object(self, dialect: JsonCalls, function: HeldFunction) -> str:
        name, key = re.escape(function.name), dialect.keys[0]
        before, after = dialect.ids
        head = f'"{name}" : ' if dialect.named_by_key else f'"{key}" : "{name}" , "{dialect.keys[1]}" : '
        first = f'(?:"{before}" : "{CALL_ID}" , )?' if before else ""
        last = f'(?: , "{after}" : "{CALL_ID}")?' if after else ""
        begins, ends = spaced(rf" \{{ {first}{head}"), spaced(rf"{last} \}} ")
        return self._grammar.rule(f"{begins} {self._as_json(function)} {ends}")

    def _as_json(self, function: HeldFunction) -> str:
        if function.name not in self._arguments:
            self._arguments[function.name] = self._grammar.json(arguments_of(function), _field(function))
        return self._arguments[function.name]

    def headers(self, dialect: HeaderCalls) -> str:
        """Return the rule for calls with a header, alone or in a section: [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}"""
        forms = (dialect.form, *dialect.more_forms)
        each = self._with_headers(forms)
        first = self._with_headers([form.removeprefix(self._opened) for form in forms]) if self._opened else each
        calls = self._grammar.rule(f"{first} ({_GAP} {each})*" if self._many else first)
        if dialect.each:
            ends, alone = self._grammar.marker(dialect.closing), f" | {each}" if self._in_text else ""
            calls = self._grammar.rule(f"{self._grammar.marker(dialect.openings[0])} {calls} {ends}{alone}")
        elif self._in_text:
            calls = each
        return self._grammar.rule(f"{calls} | {self.json(dialect.as_list)}") if dialect.as_list else calls

    def _with_headers(self, forms: Iterable[str]) -> str:
        """Return the rule for one call of any function, in one of the forms."""
        return self._grammar.rule(
            any_of([self._with_header(form, function) for function in self._functions for form in forms])
        )

    def _with_header(self, form: str, function: HeldFunction) -> str:
        """Return the rule for one call, from the dialect's form of it."""
        parts = list[str]()
        for part in re.split(r"(\{[a-z]+\})", form):
            match part:
                case "{name}":
                    parts.append(literal(function.name))
                case "{index}":
                    parts.append(f"/{_INDEX}/")
                case "{id}":
                    parts.append(f"/{CALL_ID}/")
                case "{arguments}":
                    parts.append(self._as_json(function))
                case _:
                    parts.append(self._grammar.marker(part))
        return self._grammar.rule(" ".join(parts))

    def tags(self, dialect: TagCalls) -> str:
        r"""Return the rule for calls in tags. A function whose parameters cannot be tags is called in JSON.

        <tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>
        """
        gap, marker = _GAP if dialect.gap else "", self._grammar.marker
        has_marker = dialect.openings[0] != dialect.function[0]
        tags, objects = list[str](), list[HeldFunction]()
        held, free = self._named()
        for function in held:
            try:
                tags.append(self._in_tags(dialect, function, gap))
            except NotNative as keyword:
                if not has_marker:
                    self._as_json(function)  # if that fails too, its error says more
                    message = f"tools: {function.name}: this model's calls do not support parameters with {keyword}."
                    raise JobFailure("unsupported", message, param="tools") from None
                objects.append(function)
        begins, ends = marker(dialect.openings[0]) if has_marker else "", marker(dialect.closing)
        ways = list[str]()
        if tags:
            call = self._grammar.rule(any_of(tags))
            within = f"{gap} {self._repeated(call, gap)}" if dialect.function[0] else call
            ways.append(f"{begins} {within} {gap} {ends}")
            if self._in_text and has_marker and dialect.function[0] in dialect.openings:
                ways.append(call)
        if free:
            heads = [any_of(self._heads(dialect, each)) for each in free]
            first = f"{begins} {gap if dialect.function[0] else ''}"
            ways.append(f"{first} {self._then_free(tags if dialect.function[0] else [], gap, heads)}")
            if has_marker and dialect.function[0] in dialect.openings:
                ways.append(self._then_free([], gap, heads))
        if objects:
            ways.append(f"{begins} {self._objects(JsonCalls('', ()), objects)} {ends}")
        return self._each_opened(self._grammar.rule(any_of(ways)), gap)

    def _in_tags(self, dialect: TagCalls, function: HeldFunction, gap: str) -> str:
        """Return the rule for one call. Raises `NotNative`."""
        parameters = TagParameters(self._grammar, dialect, arguments_of(function), _field(function), gap).rules()
        end = f"{gap} {self._grammar.marker(dialect.end)}" if dialect.end else ""
        return self._grammar.rule(f"{any_of(self._heads(dialect, function))} {' '.join(parameters)} {end}")

    def _heads(self, dialect: TagCalls, function: HeldFunction) -> list[str]:
        """Return the forms of the tag with a function's name."""
        heads = [self._grammar.marker(tag(dialect.function, function.name))]
        if dialect.index:
            begins, ends = tag(dialect.function, function.name, dialect.index).split("{index}")
            heads.append(f"{self._grammar.marker(begins)} /{_INDEX}/ {self._grammar.marker(ends)}")
        return heads

    def pythonic(self, dialect: PythonicCalls) -> str:
        """Return the rule for calls as in Python, or for JSON, which its models write too: [weather(city="Oslo")]"""
        calls = list[str]()
        held, free = self._named()
        for function in held:
            try:
                rule = NativeValues(self._grammar, arguments_of(function), _field(function), python=True).keywords()
                calls.append(self._grammar.rule(f"{literal(f'{function.name}(')} {rule} {literal(')')}"))
            except NotNative:
                pass  # it is called in JSON
        objects = self._objects(dialect.as_json, self._functions)
        ways, comma = [self._listed(objects), self._repeated(objects, "")], spaced(", ")
        if calls:
            call = self._grammar.rule(any_of(calls))
            ways.append(f'"[" {self._repeated(call, comma)} "]"')
        marked = [f"/\\n?/ {self._repeated(call, _GAP)} /\\n?/"] if calls else []
        heads = [literal(f"{each.name}(") for each in free]
        open_ways = [f'"[" {self._then_free(calls, comma, heads)}'] if free else []
        open_marked = [*open_ways, f"/\\n?/ {self._then_free(calls, _GAP, heads)}"] if free else []
        ends = self._grammar.marker(dialect.closing)
        openings = [each for each in dialect.openings if each != dialect.closing]
        begins = [self._grammar.marker(each) for each in openings]
        inside = [f"{begin} {any_of([*ways, *marked])} {ends}" for begin in begins]
        inside += [f"{begin} {any_of(open_marked)}" for begin in begins if free]
        if self._in_text and len(openings) < len(dialect.openings):  # what ends calls opens some too
            inside.append(f"{ends} {any_of([*ways, *open_ways])}")
        return self._grammar.rule(any_of([*([*ways, *open_ways] if dialect.bare else []), *inside]))

    def gemma(self, dialect: GemmaCalls) -> str:
        """Return the rule for calls as Gemma writes them: <|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>"""
        calls = list[str]()
        held, free = self._named()
        for function in held:
            values = NativeValues(self._grammar, arguments_of(function), _field(function), quote=dialect.quote)
            calls.append(f"{literal(f'call:{function.name}')} {values.whole()}")
        begins, ends = self._grammar.marker(dialect.openings[0]), self._grammar.marker(dialect.closing)
        ways = [f"{begins} {any_of(calls)} {ends}"] if calls else []
        if free:
            heads = [literal(f"call:{each.name}{{") for each in free]
            ways.append(f"{begins} {self._then_free([], '', heads)}")
        return self._each_opened(self._grammar.rule(any_of(ways)), "")


def harmony(grammar: Grammar, functions: Sequence[HeldFunction]) -> str:
    """Return the rule for <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}

    It allows one call, because the token that ends a call ends the answer.
    """
    each = [
        f"{literal(f'commentary to=functions.{function.name}')} "
        f"{harmony_json(grammar, arguments_of(function), _field(function))}"
        for function in functions
    ]
    return grammar.rule(f"{grammar.marker('<|channel|>')} {any_of(each)}")


def harmony_in_text(grammar: Grammar, functions: Sequence[HeldFunction]) -> str:
    """Return the rule for a call from the recipient in its header on. The channel may follow the recipient."""
    channel, constrain = grammar.marker("<|channel|>"), grammar.marker("<|constrain|>")
    between = grammar.rule(f'({channel} /commentary|analysis/)? / ?/ (({constrain})? "json")?')
    each = [
        f"{literal(f'{RECIPIENT}functions.{function.name}')} {between} {grammar.marker('<|message|>')} "
        f"{grammar.json(arguments_of(function), _field(function))}"
        for function in functions
    ]
    return grammar.rule(any_of(each))


def harmony_json(grammar: Grammar, schema: Schema, field: str) -> str:
    """Return the rule for the rest of a harmony message, from within its header on. `field`: for errors."""
    kind = f'({grammar.marker("<|constrain|>")} "json")?'
    return f"/ ?/ {kind} {grammar.marker('<|message|>')} {grammar.json(schema, field)}"


def _field(function: HeldFunction) -> str:
    return f"tools: {function.name}"


def arguments_of(function: HeldFunction) -> Schema:
    """Return the schema of a function's arguments: an object, without properties if the function names none."""
    schema = {"type": "object", **(function.parameters or {})}
    if schema["type"] != "object":
        message = f"tools: the parameters of {function.name} must be of type object."
        raise JobFailure("invalid_request", message, param="tools")
    constraints = {key for key, value in schema.items() if key not in _ANNOTATIONS and value not in ({}, [])}
    return schema if constraints else {**schema, "additionalProperties": False}
