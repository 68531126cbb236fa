"""Translates Anthropic's tools and tool choices to the contract's."""

import logging
from collections.abc import Sequence
from typing import Any

from sluice.gateway.errors import ApiError
from sluice.gateway.messages.body import (
    AnyChoice,
    CountBody,
    CustomTool,
    HostedTool,
    NamedChoice,
    NoChoice,
    Tool,
    ToolChoice,
)

logger = logging.getLogger("sluice.gateway")


def tool_fields(body: CountBody) -> dict[str, Any]:
    """Return the request's `tools`, `tool_choice` and `parallel_tool_calls`.

    Tools that Anthropic defines are left out, with one line in the log; raises `ApiError` if one of them is forced.
    """
    tools = body.tools or []
    hosted = [tool.title for tool in tools if isinstance(tool, HostedTool)]
    custom = [tool for tool in tools if isinstance(tool, CustomTool)]
    _check_choice(body.tool_choice, custom, hosted)
    if hosted:
        logger.info("left out tools that only Anthropic's servers have: %s", ascii(", ".join(hosted))[:500])
    if not custom:
        return {}
    return {"tools": [_function(tool) for tool in custom], **_choice(body.tool_choice)}


def _check_choice(choice: ToolChoice | None, custom: Sequence[Tool], hosted: Sequence[str]) -> None:
    match choice:
        case NamedChoice(name=name) if name in hosted:
            raise _refused(f"{name!r} is a tool that only Anthropic's servers have; offer a custom tool.")
        case NamedChoice(name=name) if name not in {tool.name for tool in custom}:
            raise _refused(f"{name[:80]!r} is not among the tools.")
        case AnyChoice() if hosted and not custom:
            raise _refused("all tools are ones that only Anthropic's servers have; offer a custom tool.")
        case AnyChoice() if not custom:
            raise _refused("there are no tools to choose from; send tools.")


def _refused(problem: str) -> ApiError:
    return ApiError(400, f"tool_choice: {problem}", code="invalid_request", param="tool_choice")


def _function(tool: CustomTool) -> dict[str, Any]:
    given = {"description": tool.description, "strict": tool.strict}
    optional = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema, **optional}}


def _choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    single = not isinstance(choice, NoChoice) and choice.disable_parallel_tool_use
    parallel = {"parallel_tool_calls": False} if single else {}
    match choice:
        case NamedChoice(name=name):
            return {"tool_choice": {"type": "function", "function": {"name": name}}, **parallel}
        case AnyChoice():
            return {"tool_choice": "required", **parallel}
    return {"tool_choice": choice.type, **parallel}
