"""The choice of tools of a request, as a chat completion has it."""

from collections.abc import Iterable
from typing import Any

from sluice.gateway.responses.request import fields
from sluice.gateway.responses.request.fields import refusal
from sluice.gateway.responses.request.tools import HOSTED, INPUT, MAX_TOOLS, Grammar, Tools

_MODES = ("none", "auto", "required")
# Of all grammars that one call can be held to.
MAX_GRAMMARS = 32
MAX_GRAMMAR_CHARACTERS = 20_000
MAX_PATTERN_CHARACTERS = 40_000  # of their expressions; a worker compiles these


def read_tool_choice(value: object, tools: Tools) -> dict[str, Any]:
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


def _read(value: object, tools: Tools) -> tuple[Any, list[str]]:
    """Return the chat completion's choice, and the functions to offer."""
    if value is None or isinstance(value, str):
        return value if value is None else fields.one_of(value, _MODES, "tool_choice"), list(tools.functions)
    choice = fields.mapping(value, "tool_choice")
    if choice.get("type") != "allowed_tools":
        function = _find(choice, tools, "tool_choice")
        return {"type": "function", "function": {"name": function}}, list(tools.functions)
    mode = fields.one_of(choice.get("mode"), ("auto", "required"), "tool_choice.mode")
    allowed = list(fields.entries(choice.get("tools"), "tool_choice.tools"))
    if len(allowed) > MAX_TOOLS:
        raise refusal("tool_choice.tools", f"there are more than {MAX_TOOLS:,}; name fewer.")
    offered = [(place, each) for place, each in allowed if not (isinstance(each, dict) and each.get("type") in HOSTED)]
    names = {_find(fields.mapping(each, place), tools, place) for place, each in offered}
    return mode, [function for function in tools.functions if function in names]


def _find(choice: dict[str, Any], tools: Tools, param: str) -> str:
    """Return the function of the tool that an object names. Raises `ApiError`."""
    kind = fields.text(choice.get("type"), f"{param}.type")
    if kind in HOSTED:
        raise refusal(param, f"{kind} cannot be forced, since no hosted tool runs here; force a function.")
    if kind not in ("function", "custom"):
        raise refusal(f"{param}.type", f"{kind[:40]!r} is not supported; use 'function' or 'custom'.")
    name = fields.text(choice.get("name"), f"{param}.name")
    namespace = fields.optional_text(choice.get("namespace"), f"{param}.namespace")
    for function, target in tools.targets.items():
        if (target.name, target.is_custom) == (name, kind == "custom") and namespace in (None, target.namespace):
            return function
    raise refusal(f"{param}.name", f"there is no {kind} tool {name[:64]!r} among the tools.")


def _forced(choice: Any, functions: list[str]) -> frozenset[str]:
    """Return the functions one of which must be called."""
    if isinstance(choice, dict):
        return frozenset({choice["function"]["name"]})
    return frozenset(functions if choice == "required" else ())


def _patterns(forced: Iterable[str], tools: Tools) -> dict[str, str]:
    """Return the regular expressions of the grammars of functions one of which must be called. Raises `ApiError` if a
    grammar has none, and if the grammars are many or long."""
    grammars = {function: tools.grammars[function] for function in forced if function in tools.grammars}
    _check_size(len(grammars), MAX_GRAMMARS, "grammars")
    length = sum(len(grammar.definition) for grammar in grammars.values())
    _check_size(length, MAX_GRAMMAR_CHARACTERS, "characters of grammars")
    patterns = {function: _pattern(grammar) for function, grammar in grammars.items()}
    length = sum(map(len, patterns.values()))
    _check_size(length, MAX_PATTERN_CHARACTERS, "characters of grammars as regular expressions")
    return patterns


def _check_size(size: int, limit: int, unit: str) -> None:
    if size > limit:
        problem = f"a forced call can be held to at most {limit:,} {unit}, and the tools have {size:,}; force one tool"
        raise refusal("tools", f"{problem}, or use tool_choice 'auto'.")


def _pattern(grammar: Grammar) -> str:
    """Return the regular expression of a grammar. Raises `ApiError` if there is none for it."""
    pattern = grammar.pattern()
    if pattern is None:
        problem = "a forced call cannot be held to this grammar, since no regular expression was found for it; "
        raise refusal(grammar.param, f"{problem}use one, or tool_choice 'auto'.", code="unsupported_value")
    return pattern


def _held(tool: dict[str, Any], pattern: str | None) -> dict[str, Any]:
    """Return a custom tool's function with the pattern of its input; without one, as it is."""
    if pattern is None:
        return tool
    schema = tool["function"]["parameters"]
    properties = {INPUT: {**schema["properties"][INPUT], "pattern": pattern}}
    return {**tool, "function": {**tool["function"], "parameters": {**schema, "properties": properties}}}


def _dropped(tools: Tools) -> str:
    return f"; {', '.join(tools.dropped)} run only at OpenAI" if tools.dropped else ""
