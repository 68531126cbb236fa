"""The contract as one JSON Schema, for producers in any language."""

import json
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

import schemas

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ABOUT = (
    "Point at one of $defs: Request is what goes in, Event and Result are what comes out; BatchLine, BatchOutput "
    "and Batch are those of offline files. Whole numbers are written without a fraction: 5, not 5.0. The words "
    "around it are in contract.md."
)
Mode = Literal["validation", "serialization"]
_PARTS: dict[str, tuple[Any, Mode]] = {
    "Request": (schemas.ChatRequest, "validation"),
    "Event": (schemas.Event, "serialization"),
    "Result": (schemas.ChatCompletion, "serialization"),
    "BatchLine": (schemas.BatchLine, "validation"),
    "BatchOutput": (schemas.BatchOutput, "serialization"),
    "Batch": (schemas.Batch, "serialization"),
}


class _Plain(GenerateJsonSchema):
    """Without what says nothing: titles that repeat a name, defaults of null, a least length of 0."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        said = super().default_schema(schema)
        return {name: value for name, value in said.items() if (name, value) != ("default", None)}

    def str_schema(self, schema: core_schema.StringSchema) -> JsonSchemaValue:
        said = super().str_schema(schema)
        return {name: value for name, value in said.items() if (name, value) != ("minLength", 0)}

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Where names have a pattern, other names are refused."""
        said = super().dict_schema(schema)
        return {**said, "additionalProperties": False} if "patternProperties" in said else said


def contract() -> dict[str, Any]:
    asked = [(name, mode, TypeAdapter(kind)) for name, (kind, mode) in _PARTS.items()]
    parts, shared = TypeAdapter.json_schemas(asked, schema_generator=_Plain)
    named = {name: parts[name, mode] for name, (_, mode) in _PARTS.items()}
    return {
        "$schema": _DIALECT,
        "title": f"The contract of Sluice, version {schemas.CONTRACT_VERSION}",
        "description": _ABOUT,
        "x-contract-version": schemas.CONTRACT_VERSION,
        "$defs": dict(sorted({**named, **shared["$defs"]}.items())),
    }


def text() -> str:
    return json.dumps(contract(), indent=2, ensure_ascii=False) + "\n"
