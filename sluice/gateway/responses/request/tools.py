"""Tools of a request, as functions of a chat completion: custom tools become functions with one string, and namespaces
are flattened. `Tools` restores both in the answer."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

from sluice.gateway.responses.request import fields
from sluice.gateway.responses.request.fields import refusal
from sluice.gateway.responses.request.lark import MAX_DEFINITION, lark_pattern

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
_NAME_CHARACTERS = 128  # as MCP allows; OpenAI allows 64
_FUNCTION_FIELDS = {
    "type", "name", "description", "parameters", "strict", "defer_loading", "allowed_callers", "async", "output_schema",
}  # fmt: skip
_CUSTOM_FIELDS = {"type", "name", "description", "format", "defer_loading", "allowed_callers", "async"}
_NAMESPACE_FIELDS = {"type", "name", "description", "tools"}


@dataclass(frozen=True, slots=True)
class Target:
    """The tool that a function stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of a custom tool's input. `param` is its place in the request."""

    syntax: str
    definition: str
    param: str

    def pattern(self) -> str | None:
        """Return the regular expression of the whole input; None if there is none for this grammar."""
        inner = self.definition if self.syntax == "regex" else lark_pattern(self.definition)
        return None if inner is None else f"^(?:{inner})$"


@dataclass(frozen=True)
class Tools:
    """The tools of a request, by the names of their functions."""

    functions: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # of the contract
    targets: Mapping[str, Target] = field(default_factory=dict)
    grammars: Mapping[str, Grammar] = field(default_factory=dict)  # of custom tools' inputs
    offered: tuple[dict[str, Any], ...] = ()  # as the request has them, without hosted tools
    dropped: tuple[str, ...] = ()  # types of hosted tools

    def target(self, function: str) -> Target:
        """Return the tool that a function stands for."""
        return self.targets.get(function, Target(function))

    def function(self, namespace: str | None, name: str) -> str:
        """Return the name of a tool's function, which need not be offered any more."""
        return self._by_name.get((namespace, name)) or flattened(namespace, name)

    @cached_property
    def _by_name(self) -> Mapping[tuple[str | None, str], str]:
        """The function of each namespace and name; of several, the first."""
        newest_first = reversed(list(self.targets.items()))
        return {(target.namespace, target.name): function for function, target in newest_first}


def read_tools(value: object) -> Tools:
    """Return the tools of a request. Raises `ApiError`."""
    if value is None:
        return Tools()
    reader = _Reader()
    for param, tool in fields.entries(value, "tools"):
        reader.add(fields.mapping(tool, param), param)
    return reader.tools()


def flattened(namespace: str | None, name: str) -> str:
    """Return the name of the function for a tool in a namespace, of at most 128 characters."""
    if namespace is None:
        return name
    joint = "" if namespace.endswith("_") or name.startswith("_") else "__"
    return _shortened(re.sub(r"[^A-Za-z0-9_.-]", "_", f"{namespace}{joint}{name}"), f"{namespace}\0{name}")


def _shortened(function: str, origin: str, *, always: bool = False) -> str:
    """Return the name, with a digest of its origin in place of its end if it is too long."""
    if len(function) <= _NAME_CHARACTERS and not always:
        return function
    digest = blake2b(origin.encode(errors="replace"), digest_size=4).hexdigest()
    return f"{function[: _NAME_CHARACTERS - len(digest) - 1]}_{digest}"


class _Reader:
    """Collects the tools of a request."""

    def __init__(self) -> None:
        self._functions = dict[str, dict[str, Any]]()
        self._targets = dict[str, Target]()
        self._grammars = dict[str, Grammar]()
        self._offered = list[dict[str, Any]]()
        self._dropped = list[str]()

    def tools(self) -> Tools:
        """Return the tools read so far."""
        return Tools(
            self._functions, self._targets, self._grammars, tuple(self._offered), tuple(dict.fromkeys(self._dropped))
        )

    def add(self, tool: dict[str, Any], param: str) -> None:
        """Add one tool of the request. Raises `ApiError`."""
        kind = fields.text(tool.get("type"), f"{param}.type")
        if kind in HOSTED:
            self._dropped.append(kind)
            return
        if kind == "namespace":
            self._add_namespace(tool, param)
        else:
            self._add_callable(tool, param, None, "")
        self._offered.append(tool)

    def _add_namespace(self, tool: dict[str, Any], param: str) -> None:
        fields.check_known(tool, _NAMESPACE_FIELDS, param)
        namespace = fields.text(tool.get("name"), f"{param}.name")
        about = fields.optional_text(tool.get("description"), f"{param}.description") or ""
        for place, each in fields.entries(tool.get("tools"), f"{param}.tools"):
            self._add_callable(fields.mapping(each, place), place, namespace, about)

    def _add_callable(self, tool: dict[str, Any], param: str, namespace: str | None, about: str) -> None:
        if len(self._functions) >= MAX_TOOLS:
            raise refusal("tools", f"there are more than {MAX_TOOLS:,}; send fewer.")
        kinds: dict[str, Callable[[dict[str, Any], str, str], dict[str, Any]]]
        kinds = {"function": self._function, "custom": self._custom}
        kind = fields.text(tool.get("type"), f"{param}.type")
        if kind not in kinds:
            raise refusal(f"{param}.type", f"{kind[:40]!r} is not supported; use 'function' or 'custom'.")
        name = fields.text(tool.get("name"), f"{param}.name")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name):
            raise refusal(f"{param}.name", "it must have 1 to 128 letters, digits, '_', '-' or '.'.")
        target = Target(name, namespace, kind == "custom")
        function = self._free_name(target, param)
        body = kinds[kind](tool, param, function)
        if about and not body.get("description"):
            body["description"] = about
        self._functions[function] = {"type": "function", "function": {"name": function, **body}}
        self._targets[function] = target

    def _free_name(self, target: Target, param: str) -> str:
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
            description=fields.optional_text(tool.get("description"), f"{param}.description"),
            parameters=None if parameters is None else fields.mapping(parameters, f"{param}.parameters"),
            strict=None if tool.get("strict") is None else fields.flag(tool["strict"], f"{param}.strict", False),
        )

    def _custom(self, tool: dict[str, Any], param: str, function: str) -> dict[str, Any]:
        fields.check_known(tool, _CUSTOM_FIELDS, param)
        about = fields.optional_text(tool.get("description"), f"{param}.description") or ""
        grammar = _read_grammar(tool.get("format"), f"{param}.format")
        string = {"type": "string", "description": "The whole input of the tool, as plain text."}
        if grammar is not None:
            about = f"{about}\n\nThe input follows this {grammar.syntax} grammar:\n{grammar.definition}".strip()
            self._grammars[function] = grammar
        schema = {"type": "object", "properties": {INPUT: string}, "required": [INPUT], "additionalProperties": False}
        return _without_nulls(description=about or None, parameters=schema)


def _read_grammar(value: object, param: str) -> Grammar | None:
    """Return the grammar of a custom tool's input, or None for any text. Raises `ApiError`."""
    format = fields.optional_mapping(value, param)
    if format.get("type", "text") == "text":
        return None
    if format["type"] != "grammar":
        raise refusal(f"{param}.type", "it must be 'text' or 'grammar'.")
    definition = fields.text(format.get("definition"), f"{param}.definition")
    if len(definition) > MAX_DEFINITION:
        raise refusal(f"{param}.definition", f"it has more than {MAX_DEFINITION:,} characters; send a shorter one.")
    return Grammar(fields.one_of(format.get("syntax"), ("lark", "regex"), f"{param}.syntax"), definition, param)


def _without_nulls(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
