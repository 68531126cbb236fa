"""Tools of a request, as functions of the contract: custom tools become functions with one string, and namespaces are
flattened. `RequestTools` restores both in a response, and `CustomCalls` in a chat completion."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

from sluice.http_errors import ErrorForm
from sluice.interfaces import fields
from sluice.interfaces.fields import refusal
from sluice.interfaces.lark import lark_pattern

# Tools that run at OpenAI or need models of theirs. No worker can call them, so offers of them are dropped.
HOSTED = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search",
        "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
        "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    }
)  # fmt: skip
INPUT = "input"  # the argument of a custom tool's function
MAX_TOOLS = 1_000  # of a request, those in namespaces included
_FUNCTION_FIELDS = {
    "type", "name", "description", "parameters", "strict", "defer_loading", "allowed_callers", "async", "output_schema",
}  # fmt: skip
_CUSTOM_FIELDS = {"type", "name", "description", "format", "defer_loading", "allowed_callers", "async"}
_NAMESPACE_FIELDS = {"type", "name", "description", "tools"}


@dataclass(frozen=True, slots=True)
class CalledTool:
    """The tool that a function stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class _InputGrammar:
    """The grammar of a custom tool's input. `param` is its place in the request."""

    syntax: str
    definition: str
    param: str


@dataclass(frozen=True)
class RequestTools:
    """The tools of a request, by the names of their functions."""

    functions: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # of the contract
    targets: Mapping[str, CalledTool] = field(default_factory=dict)
    grammars: Mapping[str, _InputGrammar] = field(default_factory=dict)  # of custom tools' inputs
    offered: tuple[dict[str, Any], ...] = ()  # as the request has them, without hosted tools
    dropped: tuple[str, ...] = ()  # types of hosted tools

    def target(self, function: str) -> CalledTool:
        """Return the tool that a function stands for."""
        return self.targets.get(function, CalledTool(function))

    def function(self, namespace: str | None, name: str) -> str:
        """Return the name of a tool's function, which need not be offered any more."""
        return self._by_name.get((namespace, name)) or flattened(namespace, name)

    @cached_property
    def _by_name(self) -> Mapping[tuple[str | None, str], str]:
        """The function of each namespace and name; of several, the first."""
        newest_first = reversed(list(self.targets.items()))
        return {(target.namespace, target.name): function for function, target in newest_first}


def read_tools(value: object) -> RequestTools:
    """Return the tools of a request. Raises `ApiError`."""
    if value is None:
        return RequestTools()
    reader = _Reader()
    for param, tool in fields.entries(value, "tools"):
        reader.add(fields.mapping(tool, param), param)
    return reader.tools()


def _unnested(value: dict[str, Any], param: str) -> tuple[dict[str, Any], str]:
    """Return the fields of a tool, a choice or a format, and their place: chat completions have them under its type."""
    kind = value.get("type")
    inner = value.get(kind) if isinstance(kind, str) else None
    return ({"type": kind, **inner}, f"{param}.{kind}") if isinstance(inner, dict) else (value, param)


def flattened(namespace: str | None, name: str) -> str:
    """Return the name of the function for a tool in a namespace, of at most 128 characters."""
    if namespace is None:
        return name
    joint = "" if namespace.endswith("_") or name.startswith("_") else "__"
    return _shortened(re.sub(r"[^A-Za-z0-9_.-]", "_", f"{namespace}{joint}{name}"), f"{namespace}\0{name}")


def _shortened(function: str, origin: str, *, always: bool = False) -> str:
    """Return the name, with a digest of its origin in place of its end if it is too long."""
    most_characters = 128  # as MCP allows; OpenAI allows 64
    if len(function) <= most_characters and not always:
        return function
    digest = blake2b(origin.encode(errors="replace"), digest_size=4).hexdigest()
    return f"{function[: most_characters - len(digest) - 1]}_{digest}"


class _Reader:
    """Collects the tools of a request."""

    def __init__(self) -> None:
        self._functions = dict[str, dict[str, Any]]()
        self._targets = dict[str, CalledTool]()
        self._grammars = dict[str, _InputGrammar]()
        self._offered = list[dict[str, Any]]()
        self._dropped = list[str]()

    def tools(self) -> RequestTools:
        """Return the tools read so far."""
        return RequestTools(
            self._functions, self._targets, self._grammars, tuple(self._offered), tuple(dict.fromkeys(self._dropped))
        )

    def add(self, tool: dict[str, Any], param: str) -> None:
        """Add one tool of the request. Raises `ApiError`."""
        kind = fields.string(tool.get("type"), f"{param}.type")
        if kind in HOSTED:
            self._dropped.append(kind)
            return
        if kind == "namespace":
            self._add_namespace(tool, param)
        else:
            self._add_callable(*_unnested(tool, param), None, "")
        self._offered.append(tool)

    def _add_namespace(self, tool: dict[str, Any], param: str) -> None:
        fields.check_known(tool, _NAMESPACE_FIELDS, param)
        namespace = fields.string(tool.get("name"), f"{param}.name")
        about = fields.optional_string(tool.get("description"), f"{param}.description") or ""
        for place, each in fields.entries(tool.get("tools"), f"{param}.tools"):
            self._add_callable(fields.mapping(each, place), place, namespace, about)

    def _add_callable(self, tool: dict[str, Any], param: str, namespace: str | None, about: str) -> None:
        if len(self._functions) >= MAX_TOOLS:
            raise refusal("tools", f"there are more than {MAX_TOOLS:,}; send fewer.")
        kinds: dict[str, Callable[[dict[str, Any], str, str], dict[str, Any]]]
        kinds = {"function": self._function, "custom": self._custom}
        kind = fields.string(tool.get("type"), f"{param}.type")
        if kind not in kinds:
            raise refusal(f"{param}.type", f"{kind[:40]!r} is not supported; use 'function' or 'custom'.")
        name = fields.string(tool.get("name"), f"{param}.name")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name):
            raise refusal(f"{param}.name", "it must have 1 to 128 letters, digits, '_', '-' or '.'.")
        target = CalledTool(name, namespace, kind == "custom")
        function = self._free_name(target, param)
        body = kinds[kind](tool, param, function)
        if about and not body.get("description"):
            body["description"] = about
        self._functions[function] = {"type": "function", "function": {"name": function, **body}}
        self._targets[function] = target

    def _free_name(self, target: CalledTool, param: str) -> str:
        function = flattened(target.namespace, target.name)
        if function in self._targets and target.namespace is not None:
            function = _shortened(function, f"{target.namespace}\0{target.name}", always=True)
        if function in self._targets:
            raise refusal(f"{param}.name", f"{target.name!r} is the name of an earlier tool; use another.")
        return function

    def _function(self, tool: dict[str, Any], param: str, function: str) -> dict[str, Any]:
        fields.check_known(tool, _FUNCTION_FIELDS, param)
        parameters = tool.get("parameters")
        return _without_nulls(
            description=fields.optional_string(tool.get("description"), f"{param}.description"),
            parameters=None if parameters is None else fields.mapping(parameters, f"{param}.parameters"),
            strict=None if tool.get("strict") is None else fields.flag(tool["strict"], f"{param}.strict", False),
        )

    def _custom(self, tool: dict[str, Any], param: str, function: str) -> dict[str, Any]:
        fields.check_known(tool, _CUSTOM_FIELDS, param)
        about = fields.optional_string(tool.get("description"), f"{param}.description") or ""
        grammar = _read_grammar(tool.get("format"), f"{param}.format")
        string = {"type": "string", "description": "The whole input of the tool, as plain text."}
        if grammar is not None:
            about = f"{about}\n\nThe input follows this {grammar.syntax} grammar:\n{grammar.definition}".strip()
            self._grammars[function] = grammar
        schema = {"type": "object", "properties": {INPUT: string}, "required": [INPUT], "additionalProperties": False}
        return _without_nulls(description=about or None, parameters=schema)


def _read_grammar(value: object, param: str) -> _InputGrammar | None:
    """Return the grammar of a custom tool's input, or None for any text. Raises `ApiError`."""
    format, param = _unnested(fields.optional_mapping(value, param), param)
    if format.get("type", "text") == "text":
        return None
    if format["type"] != "grammar":
        raise refusal(f"{param}.type", "it must be 'text' or 'grammar'.")
    definition = fields.string(format.get("definition"), f"{param}.definition")
    if len(definition) > 10_000:
        raise refusal(f"{param}.definition", "it has more than 10,000 characters; send a shorter one.")
    return _InputGrammar(fields.option(format.get("syntax"), ("lark", "regex"), f"{param}.syntax"), definition, param)


def _without_nulls(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


_MODES = ("none", "auto", "required")


def read_tool_choice(value: object, tools: RequestTools) -> dict[str, Any]:
    """Return the fields `tools` and `tool_choice` of the chat completion. Raises `ApiError`: for a hosted tool that is
    forced, for a tool that is not offered, and for forced tools whose grammars cannot be enforced or are too long."""
    choice, functions = _read(value, tools)
    if choice == "required" and not functions:
        raise refusal("tool_choice", f"'required' needs a tool that can be called here{_dropped(tools)}.")
    if not functions:
        return {}
    patterns = _patterns(_forced(choice, functions), tools)
    offered = [_held(tools.functions[each], patterns.get(each)) for each in functions]
    return {"tools": offered, **({} if choice is None else {"tool_choice": choice})}


def _read(value: object, tools: RequestTools) -> tuple[Any, list[str]]:
    """Return the chat completion's choice, and the functions to offer."""
    if value is None or isinstance(value, str):
        return value if value is None else fields.option(value, _MODES, "tool_choice"), list(tools.functions)
    choice, place = _unnested(fields.mapping(value, "tool_choice"), "tool_choice")
    if choice.get("type") != "allowed_tools":
        function = _find(choice, place, tools)
        return {"type": "function", "function": {"name": function}}, list(tools.functions)
    mode = fields.option(choice.get("mode"), ("auto", "required"), f"{place}.mode")
    allowed = list(fields.entries(choice.get("tools"), f"{place}.tools"))
    if len(allowed) > MAX_TOOLS:
        raise refusal(f"{place}.tools", f"there are more than {MAX_TOOLS:,}; name fewer.")
    offered = [(place, each) for place, each in allowed if not (isinstance(each, dict) and each.get("type") in HOSTED)]
    names = {_find(*_unnested(fields.mapping(each, place), place), tools) for place, each in offered}
    return mode, [function for function in tools.functions if function in names]


def _find(choice: dict[str, Any], param: str, tools: RequestTools) -> str:
    """Return the function of the tool that an object names. Raises `ApiError`."""
    kind = fields.string(choice.get("type"), f"{param}.type")
    if kind in HOSTED:
        raise refusal(param, f"{kind} cannot be forced, since no hosted tool runs here; force a function.")
    if kind not in ("function", "custom"):
        raise refusal(f"{param}.type", f"{kind[:40]!r} is not supported; use 'function' or 'custom'.")
    name = fields.string(choice.get("name"), f"{param}.name")
    namespace = fields.optional_string(choice.get("namespace"), f"{param}.namespace")
    for function, target in tools.targets.items():
        if (target.name, target.is_custom) == (name, kind == "custom") and namespace in (None, target.namespace):
            return function
    raise refusal(f"{param}.name", f"there is no {kind} tool {name[:64]!r} among the tools.")


def _forced(choice: Any, functions: list[str]) -> frozenset[str]:
    """Return the functions one of which must be called."""
    if isinstance(choice, dict):
        return frozenset({choice["function"]["name"]})
    return frozenset(functions if choice == "required" else ())


def _patterns(forced: Iterable[str], tools: RequestTools) -> dict[str, str]:
    """Return the regular expressions of the grammars of functions one of which must be called. Raises `ApiError` if a
    grammar has none, and if the grammars are many or long."""
    grammars = {function: tools.grammars[function] for function in forced if function in tools.grammars}
    _check_size(len(grammars), 32, "grammars")
    length = sum(len(grammar.definition) for grammar in grammars.values())
    _check_size(length, 20_000, "characters of grammars")
    patterns = {function: _pattern(grammar) for function, grammar in grammars.items()}
    length = sum(map(len, patterns.values()))
    _check_size(length, 40_000, "characters of grammars as regular expressions")  # which a worker compiles
    return patterns


def _check_size(size: int, limit: int, unit: str) -> None:
    if size > limit:
        problem = f"a forced call can be held to at most {limit:,} {unit}, and the tools have {size:,}; force one tool"
        raise refusal("tools", f"{problem}, or use tool_choice 'auto'.")


def _pattern(grammar: _InputGrammar) -> str:
    """Return the regular expression of a whole input. Raises `ApiError` if there is none for this grammar."""
    pattern = grammar.definition if grammar.syntax == "regex" else lark_pattern(grammar.definition)
    if pattern is None:
        problem = "a forced call cannot be held to this grammar, since no regular expression was found for it; "
        raise refusal(grammar.param, f"{problem}use one, or tool_choice 'auto'.", ErrorForm.UNSUPPORTED_VALUE)
    return f"^(?:{pattern})$"


def _held(tool: dict[str, Any], pattern: str | None) -> dict[str, Any]:
    """Return a custom tool's function with the pattern of its input; without one, as it is."""
    if pattern is None:
        return tool
    schema = tool["function"]["parameters"]
    properties = {INPUT: {**schema["properties"][INPUT], "pattern": pattern}}
    return {**tool, "function": {**tool["function"], "parameters": {**schema, "properties": properties}}}


def _dropped(tools: RequestTools) -> str:
    return f"; {', '.join(tools.dropped)} run only at OpenAI" if tools.dropped else ""


_OPENING = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
# Whole characters of a JSON string: a pair of surrogates is one, and half of a pair is not yet any.
_CHARACTERS = re.compile(
    r'(?:[^"\\]'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt])*'
)


class InputText:
    """Decodes the string of `{"input": "..."}` piece by piece. The arguments of another form have no pieces."""

    def __init__(self) -> None:
        self._pending = ""  # JSON that is not decoded yet
        self._is_open = False
        self._has_ended = False
        self._decoded = list[str]()

    @property
    def text(self) -> str:
        """The input so far."""
        return "".join(self._decoded)

    def feed(self, written: str) -> str:
        """Add a piece of the arguments, and return what it adds to the input."""
        if self._has_ended:
            return ""
        self._pending += written
        if not self._is_open and not self._open():
            return ""
        characters = _CHARACTERS.match(self._pending)
        assert characters is not None, "the expression matches the empty string"
        self._pending = self._pending[characters.end() :]
        self._has_ended = self._pending.startswith('"')
        more: str = json.loads(f'"{characters[0]}"', strict=False)
        self._decoded.append(more)
        return more

    def _open(self) -> bool:
        opening = _OPENING.match(self._pending)
        if opening is None:
            self._has_ended = len(self._pending) > 64  # so long without the string: they are of another form
            return False
        self._pending = self._pending[opening.end() :]
        self._is_open = True
        return True


def whole_input(arguments: str, so_far: str) -> str:
    """Return the input of complete arguments; of others, what could be decoded so far, or else the text itself."""
    try:
        parsed = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return so_far or arguments
    if isinstance(parsed, dict) and isinstance(parsed.get(INPUT), str):
        return str(parsed[INPUT])
    return arguments


def read_chat_tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], RequestTools]:
    """Return the body of a chat completion with functions in place of custom tools, of their calls in its history, and
    of a choice of allowed tools; and its tools, none if it has no custom ones. Raises `ApiError`."""
    read = dict(body)
    if isinstance(messages := body.get("messages"), list):
        read["messages"] = [_with_functions(message) for message in messages]
    choice = body.get("tool_choice")
    is_ours = isinstance(choice, dict) and choice.get("type") in ("allowed_tools", "custom")
    if not is_ours and not any(map(_is_custom, _listed(body.get("tools")))):
        return read, RequestTools()
    tools = read_tools(body.get("tools"))
    if tools.dropped:
        problem = f"{tools.dropped[0]} runs only at OpenAI; leave it out."
        raise refusal("tools", problem, ErrorForm.UNSUPPORTED_VALUE)
    rest = {name: value for name, value in read.items() if name not in ("tools", "tool_choice")}
    return {**rest, **read_tool_choice(choice, tools)}, tools


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_custom(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "custom"


def _with_functions(message: Any) -> Any:
    """Return a message of a chat completion with calls of functions in place of calls of custom tools."""
    calls = _listed(message.get("tool_calls")) if isinstance(message, dict) else []
    if not any(map(_is_custom, calls)):
        return message
    return {**message, "tool_calls": [_as_function(call) if _is_custom(call) else call for call in calls]}


def _as_function(call: dict[str, Any]) -> dict[str, Any]:
    custom = fields.mapping(call.get("custom"), "messages.tool_calls.custom")
    arguments = json.dumps({INPUT: fields.string(custom.get("input"), "messages.tool_calls.custom.input")})
    return {"id": call.get("id"), "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


class CustomCalls:
    """Restores the calls of custom tools in the chunks of one choice of a chat completion, from those of their
    functions."""

    def __init__(self, tools: RequestTools) -> None:
        self._tools = tools
        self._written = dict[int, tuple[list[str], InputText]]()  # of the calls of custom tools that are open

    def in_chunk(self, chunk: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a chunk of the choice with its calls restored. The one that ends the choice has what arguments of
        another form than was expected add to an input."""
        if not self._tools.targets or not chunk["choices"]:
            return chunk
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        calls = [each for call in delta.get("tool_calls") or () for each in self._fragment(call)]
        if choice["finish_reason"] is not None:
            calls += [each for index in self._written for each in self._rest(index)]
        others = {name: value for name, value in delta.items() if name != "tool_calls"}
        restored = {**others, "tool_calls": calls} if calls else others
        return {**chunk, "choices": [{**choice, "delta": restored}]}

    def _fragment(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        index, function = call["index"], call.get("function", {})
        begun = list[dict[str, Any]]()
        if (name := function.get("name")) and self._tools.target(name).is_custom:
            self._written[index] = [], InputText()
            begun = [{"index": index, "id": call.get("id"), "type": "custom", "custom": {"name": name, "input": ""}}]
        if index not in self._written:
            return [call]
        pieces, text = self._written[index]
        pieces.append(function.get("arguments") or "")
        more = text.feed(pieces[-1])
        return [*begun, *([{"index": index, "custom": {"input": more}}] if more else [])]

    def _rest(self, index: int) -> list[dict[str, Any]]:
        pieces, text = self._written[index]
        rest = whole_input("".join(pieces), text.text).removeprefix(text.text)
        return [{"index": index, "custom": {"input": rest}}] if rest else []


def with_custom_calls(result: Mapping[str, Any], tools: RequestTools) -> dict[str, Any]:
    """Return a result of one choice with its calls of custom tools restored."""
    (choice,) = result["choices"]
    message = choice["message"]
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [_restored(call, tools) for call in message["tool_calls"]]}
    return {**result, "choices": [{**choice, "message": message}]}


def _restored(call: dict[str, Any], tools: RequestTools) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not tools.target(name).is_custom:
        return call
    text = whole_input(arguments, InputText().feed(arguments))
    return {"id": call["id"], "type": "custom", "custom": {"name": name, "input": text}}
