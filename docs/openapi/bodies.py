"""The schemas of the requests' bodies."""

from typing import Any

from pydantic import TypeAdapter

from schemas import ChatRequest, EmbeddingRequest
from schemas.generate import NamedByClass
from sluice.interfaces.messages.body import CountBody, MessagesBody
from sluice.interfaces.responses.request import KNOWN

Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/{model}"
_TEXT: Schema = {"type": ["string", "null"]}
_FLAG: Schema = {"type": ["boolean", "null"]}
_OBJECT: Schema = {"type": ["object", "null"]}
_MODEL: Schema = {**_TEXT, "description": "A served name, or one that the gateway maps to one."}
_CHOICES: Schema = {"type": ["integer", "null"], "minimum": 1, "maximum": 128}
_PART: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["input_text", "output_text", "input_image", "refusal"]},
        "text": {"type": "string"},
        "image_url": {"type": "string"},
        "detail": {"enum": ["auto", "low", "high", "original"]},
    },
    "required": ["type"],
}
_ITEM: Schema = {
    "type": "object",
    "properties": {
        "type": {
            "enum": [
                "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
                "custom_tool_call_output",
            ]
        },
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
        "name": {"type": "string"},
        "call_id": {"type": "string"},
        "arguments": {"type": "string"},
        "input": {"type": "string"},
        "output": {"type": ["string", "array"]},
    },
}  # fmt: skip
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function", "custom", "namespace", "web_search"]},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
        "description": _TEXT,
        "parameters": _OBJECT,
        "strict": _FLAG,
        "format": _OBJECT,
        "tools": {"type": "array"},
    },
    "required": ["type"],
}
# What the gateway takes beside the contract's functions in a chat completion.
_CUSTOM_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "custom"},
        "custom": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "description": _TEXT, "format": _OBJECT},
            "required": ["name"],
        },
    },
    "required": ["type", "custom"],
}
_CHOICE: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["custom", "allowed_tools"]}, "custom": _OBJECT, "allowed_tools": _OBJECT},
    "required": ["type"],
}
# The fields of a response's request that a chat completion lacks, or has in another form.
_OF_RESPONSES: dict[str, Schema] = {
    "background": _FLAG,
    "client_metadata": _OBJECT,
    "include": {"type": ["array", "null"], "items": {"type": "string"}},
    "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM}]},
    "instructions": _TEXT,
    "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
    "max_tool_calls": {"type": ["integer", "null"], "minimum": 0},
    "metadata": {"type": ["object", "null"], "maxProperties": 16, "additionalProperties": {"type": "string"}},
    "model": _MODEL,
    "previous_response_id": _TEXT,
    "prompt_cache_options": _OBJECT,
    "prompt_cache_retention": _TEXT,
    "reasoning": {
        "type": ["object", "null"],
        "properties": {
            "effort": _TEXT,
            "max_tokens": {"type": ["integer", "null"], "minimum": 0},
            "summary": {"enum": ["auto", "concise", "detailed", None]},
        },
    },
    "stream": _FLAG,
    "stream_options": _OBJECT,
    "text": {"type": ["object", "null"], "properties": {"format": _OBJECT, "verbosity": _TEXT}},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _OBJECT]},
    "tools": {"type": ["array", "null"], "items": _TOOL, "maxItems": 1_000},
    "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    "truncation": {"enum": ["disabled", None]},
}


def bodies() -> dict[str, Schema]:
    """Return the schemas by name: those of the models, with what the gateway itself reads of them, and the others'."""
    kinds: list[Any] = [
        (kind.__name__, "validation", TypeAdapter(kind))
        for kind in (ChatRequest, EmbeddingRequest, MessagesBody, CountBody)
    ]
    _, shared = TypeAdapter.json_schemas(kinds, ref_template=_REFERENCE, schema_generator=NamedByClass)
    schemas: dict[str, Schema] = shared["$defs"]
    chat, embeddings = schemas["ChatRequest"], schemas["EmbeddingRequest"]
    fields = {**chat["properties"], "n": _CHOICES, "model": _MODEL}
    tools = {"type": "array", "items": {"anyOf": [{"$ref": _REFERENCE.format(model="Tool")}, _CUSTOM_TOOL]}}
    fields["tools"] = {**fields["tools"], "anyOf": [tools, {"type": "null"}]}
    fields["tool_choice"] = {**fields["tool_choice"], "anyOf": [*fields["tool_choice"]["anyOf"], _CHOICE]}
    return {
        **schemas,
        "ChatRequest": {**chat, "properties": fields},
        "EmbeddingRequest": {**embeddings, "properties": {**embeddings["properties"], "model": _MODEL}},
        "CompletionRequest": _completion(fields),
        "ResponseRequest": _response(fields),
    }


def _response(chat: dict[str, Schema]) -> Schema:
    same = {name: chat[name] for name in sorted(KNOWN - _OF_RESPONSES.keys())}
    return {"type": "object", "properties": {**_OF_RESPONSES, **same}, "additionalProperties": False}


def _completion(chat: dict[str, Schema]) -> Schema:
    names = ("max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "n", "logit_bias")
    prompt = {"anyOf": [{"type": "string"}, {"type": "array"}]}
    return {
        "type": "object",
        "properties": {"model": _MODEL, "prompt": prompt, **{name: chat[name] for name in names}},
        "required": ["prompt"],
    }
