"""Reads parameters of qwen3_coder's calls that mlx-lm's parser (0.32) would misread: those without a single `type`.

The parser reads 5 for {"anyOf": [{"type": "integer"}, {"type": "null"}]} as "5". So it is told that such a parameter is
a string, and its text is read here: as JSON if that is of one of the types, else as the string that it is.
"""

import json
from typing import Any, NoReturn

from worker.text.output.events import Tools

_MAX_STEPS = 100  # references and alternatives of one parameter
_UNTYPED = frozenset({"string", "object", "array", "null"})  # of these the parser reads a parameter without types


def with_strings(tools: Tools) -> Tools:
    """Return the tools for mlx-lm's parser: parameters that `read` reads are strings."""
    return [{**tool, "function": {**tool["function"], "parameters": _as_strings(tool)}} for tool in tools]


def read(call: dict[str, Any], tools: Tools) -> dict[str, Any]:
    """Return the parser's call with the meant values of the parameters that it has read as strings."""
    for tool in tools:
        if tool["function"]["name"] == call["name"]:
            types = _types_by_name(tool)
            arguments = {
                name: _value(text, types[name]) if name in types and isinstance(text, str) else text
                for name, text in call["arguments"].items()
            }
            return {**call, "arguments": arguments}
    return call


def _as_strings(tool: dict[str, Any]) -> Any:
    types, parameters = _types_by_name(tool), tool["function"]["parameters"]
    if not types:
        return parameters
    return {**parameters, "properties": parameters["properties"] | {name: {"type": "string"} for name in types}}


def _types_by_name(tool: dict[str, Any]) -> dict[str, frozenset[str]]:
    """Return the types of each parameter that has several, or has them by reference."""
    parameters = tool["function"]["parameters"]
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {
        name: _types(schema, parameters)
        for name, schema in properties.items()
        if isinstance(schema, dict)
        and (isinstance(schema.get("type"), list) or ("type" not in schema and schema.keys() & {"anyOf", "$ref"}))
    }


def _types(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    found, waiting = set[str](), [schema]
    for _ in range(_MAX_STEPS):
        if not waiting:
            break
        match waiting.pop():
            case {"type": str() as name}:
                found.add(name)
            case {"type": list() as names}:
                found.update(name for name in names if isinstance(name, str))
            case {"anyOf": list() as branches}:
                waiting += branches
            case {"$ref": str() as reference}:
                match reference.split("/"):
                    case ["#", ("$defs" | "definitions") as where, name] if isinstance(root.get(where), dict):
                        waiting.append(root[where].get(name))
            case _:
                found |= _UNTYPED
    return frozenset(found)


def _value(text: str, types: frozenset[str]) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value if _type(value) & types else text


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON.")


def _type(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
    return set()
