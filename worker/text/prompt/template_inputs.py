"""What a chat template gets besides the messages: a request's tools and variables, in a form that it accepts."""

import re
from collections.abc import Callable
from typing import Any

from schemas import ChatRequest
from schemas.chat import TEMPLATE_FIELDS

TemplateTools = list[dict[str, Any]]
Variables = dict[str, Any]
_Change = Callable[[dict[str, Any]], dict[str, Any]]

_EFFORT = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")  # templates' names of the variable that switches reasoning off
_BUDGET = "thinking_budget"  # the variable by which some templates tell the model its budget
_EFFORTS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")  # of any template, the least first
_HARMONY = (
    "<|channel|>",
    ("low", "medium", "high"),
)  # a marker of gpt-oss's template, which writes any effort as it is


class TemplateFailed(Exception):
    """A chat template refused its input, or failed on it. The cause is what it raised, which may be anything."""


def template_variables(request: ChatRequest, template: str) -> tuple[Variables, list[str]]:
    """Return the variables, and the names of set fields that the template does not read.

    Reasoning is switched off for the effort "none" and a budget of 0. `template`: its source. It is empty if the
    template is not text, which then gets only `chat_template_kwargs`.
    """
    asked = {name: value for name in TEMPLATE_FIELDS if (value := getattr(request, name)) is not None}
    budget, is_off = request.reasoning_limit, request.reasoning_effort == "none" or request.reasoning_limit == 0
    implied: Variables = dict.fromkeys(_SWITCHES, False) if is_off else {}
    if is_off or budget is not None:
        implied[_BUDGET] = 0 if is_off else budget
    read = {name: value for name, value in (asked | implied).items() if re.search(rf"\b{name}\b", template)}
    effective = {_EFFORT} if request.reasoning_effort == "none" and read.keys() & {*_SWITCHES} else set()
    return {**read, **(request.chat_template_kwargs or {})}, sorted(asked.keys() - read.keys() - effective)


def _described(function: dict[str, Any]) -> dict[str, Any]:
    return {"description": "", "parameters": {"type": "object", "properties": {}}, **function}


def _single_types(schema: Any) -> Any:
    """Return a schema in which no `type` is a list: the first that is not null stands for all."""
    if isinstance(schema, list):
        return [_single_types(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {name: _single_types(value) for name, value in schema.items()}
    types = schema.get("type")
    if isinstance(types, list) and types:
        changed["type"] = next((type for type in types if type != "null"), types[0])
    return changed


# Changes of a tool's function that some templates require, each with the template's restriction and the change, which
# are logged.
_TOOL_CHANGES: dict[_Change, str] = {
    _described: "requires a description and parameters of each function: empty ones are added",
    _single_types: "accepts no list of types in a tool's parameters: the first type is shown",
}


class TemplateInputs:
    """Finds forms of tools and of the reasoning effort that one chat template accepts; a worker has one.

    It remembers what was necessary before: that saves trials."""

    def __init__(self, template: str = "") -> None:
        """`template`: its source; empty if it is not text."""
        self._changes: tuple[_Change, ...] = ()
        # By what was requested; None: the template accepts none.
        self._efforts: dict[str, str | None] = dict(_efforts_named_in(template))

    def known(self, tools: TemplateTools, variables: Variables) -> tuple[TemplateTools, Variables, list[str]]:
        """Return the input with what earlier requests needed, and why the effort was changed."""
        given = self._with_effort(variables)
        effort = given.get(_EFFORT)
        whys = [_other_effort(variables[_EFFORT], effort)] if effort != variables.get(_EFFORT) else []
        return _with_changes(tools, self._changes), given, whys

    def settle(
        self, tools: TemplateTools, variables: Variables, render: Callable[[TemplateTools, Variables], str]
    ) -> tuple[TemplateTools, Variables, list[str]] | None:
        """Return a form of the input with which the template renders a short conversation, and why it was changed.
        None if the input is accepted as it is, or in no form. `render` raises `TemplateFailed`."""
        efforts = [variables.get(_EFFORT), *_nearest(variables.get(_EFFORT))]
        for changes in ((), *((each,) for each in _TOOL_CHANGES), tuple(_TOOL_CHANGES)) if tools else ((),):
            for effort in efforts:
                changed, given = _with_changes(tools, changes), _with(variables, effort)
                try:
                    render(changed, given)
                except TemplateFailed:
                    continue
                return self._settled(changed, given, changes, variables, effort)
        return None

    def _settled(
        self,
        tools: TemplateTools,
        given: Variables,
        changes: tuple[_Change, ...],
        asked: Variables,
        effort: str | None,
    ) -> tuple[TemplateTools, Variables, list[str]] | None:
        whys = [_TOOL_CHANGES[each] for each in changes]
        if effort != asked.get(_EFFORT):
            if isinstance(asked[_EFFORT], str):
                self._efforts[asked[_EFFORT]] = effort
            whys.append(_other_effort(asked[_EFFORT], effort))
        self._changes = tuple(each for each in _TOOL_CHANGES if each in (*self._changes, *changes))
        return (tools, given, whys) if whys else None

    def _with_effort(self, variables: Variables) -> Variables:
        asked = variables.get(_EFFORT)
        if not isinstance(asked, str) or asked not in self._efforts:
            return variables
        return _with(variables, self._efforts[asked])


def _other_effort(asked: Any, given: Any) -> str:
    return f"does not accept {_EFFORT} {asked!r}: it gets {given or 'none at all'}"


def _efforts_named_in(template: str) -> dict[str, str]:
    """Return the nearest effort that a template names for each that it does not name. Many treat what they do not name
    as their default, which may be the greatest. If "low" is not named, the default may be less than what is."""
    marker, of_harmony = _HARMONY
    named = (
        of_harmony if marker in template else [each for each in _EFFORTS if re.search(f"['\"]{each}['\"]", template)]
    )
    if not re.search(rf"\b{_EFFORT}\b", template) or "low" not in named[:-1]:
        return {}
    nearest = {each: next(other for other in _nearest(each) if other in named) for each in _EFFORTS}
    return {each: other for each, other in nearest.items() if each not in named and other}


def _with_changes(tools: TemplateTools, changes: tuple[_Change, ...]) -> TemplateTools:
    for change in changes:
        tools = [{**tool, "function": change(tool["function"])} for tool in tools]
    return tools


def _with(variables: Variables, effort: str | None) -> Variables:
    if variables.get(_EFFORT) == effort:
        return variables
    others = {name: value for name, value in variables.items() if name != _EFFORT}
    return others if effort is None else {**others, _EFFORT: effort}


def _nearest(effort: Any) -> list[str | None]:
    """Return the other efforts, the nearest first and of two the greater, and at last none at all."""
    if effort is None:
        return []
    if effort not in _EFFORTS:
        return [None]
    place = _EFFORTS.index(effort)
    others = sorted(range(len(_EFFORTS)), key=lambda other: (abs(other - place), -other))
    return [*(_EFFORTS[other] for other in others if other != place), None]
