"""The OpenAPI document: operations, parameters and answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from docs.openapi.bodies import bodies

FILE = Path(__file__).parent.parent.parent / "sluice" / "gateway" / "openapi" / "static" / "openapi.json"
VERSION = "1"  # the contract's
_ABOUT = "OpenAI's and Anthropic's interfaces to models on Apple MLX. docs/gateway.md explains them."

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path. `body` and `answer` name schemas; `form` is that of its errors."""

    method: str
    path: str
    summary: str
    body: str | None = None
    answer: str | None = None
    streams: bool = False
    parameters: Sequence[str] = ()
    form: str = "Error"
    media_type: str = "application/json"
    is_open: bool = False  # needs no key
    body_type: str = "application/json"


_CHAT = "/v1/chat/completions"
_MESSAGE_BATCHES = "/v1/messages/batches"
_RESPONSES = "/v1/responses"
_UPLOADS = "/v1/uploads"
_MESSAGES = "/v1/messages"
_ANTHROPIC = ("anthropic-version", "anthropic-beta")
OPERATIONS = (
    Operation(
        "post", _CHAT, "Create a chat completion", "ChatRequest", "ChatCompletion", True, ("idempotency-key",)
    ),
    Operation("get", f"{_CHAT}/{{id}}", "Retrieve a chat completion once it has ended", None, "ChatCompletion"),
    Operation(
        "get", f"{_CHAT}/{{id}}/stream", "Stream a chat completion again", None, None, True,
        ("last-event-id", "include_usage"),
    ),
    Operation("post", f"{_CHAT}/{{id}}/cancel", "Cancel a chat completion", None, "Cancelled"),
    Operation("post", "/v1/completions", "Refused: create a chat completion", "CompletionRequest"),
    Operation("post", _RESPONSES, "Create a response", "ResponseRequest", "Response", True, ("idempotency-key",)),
    Operation(
        "get", f"{_RESPONSES}/{{id}}", "Retrieve or stream a response", None, "Response", True,
        ("stream", "starting_after", "last-event-id"),
    ),
    Operation("delete", f"{_RESPONSES}/{{id}}", "Delete a response", None, "Deleted"),
    Operation("post", f"{_RESPONSES}/{{id}}/cancel", "Cancel a response", None, "Response"),
    Operation(
        "get", f"{_RESPONSES}/{{id}}/input_items", "List the input of a response", None, "List", False,
        ("limit", "order", "after"),
    ),
    Operation(
        "post", _MESSAGES, "Create a message", "MessagesBody", "Message", True, (*_ANTHROPIC, "idempotency-key"),
        "AnthropicError",
    ),
    Operation(
        "post", f"{_MESSAGES}/count_tokens", "Count the tokens of a prompt", "CountBody", "TokenCount", False,
        _ANTHROPIC, "AnthropicError",
    ),
    Operation(
        "post", "/v1/embeddings", "Create embeddings", "EmbeddingRequest", "Embeddings", False, ("idempotency-key",)
    ),
    Operation("post", "/v1/files", "Upload a file", "FileForm", "File", body_type="multipart/form-data"),
    Operation("get", "/v1/files", "List files", None, "List", parameters=("limit", "order", "after", "purpose")),
    Operation("get", "/v1/files/{id}", "Retrieve a file's description", None, "File"),
    Operation(
        "get", "/v1/files/{id}/content", "Download a file", parameters=("range", "if-none-match"),
        media_type="application/octet-stream",
    ),
    Operation("delete", "/v1/files/{id}", "Delete a file", None, "DeletedFile"),
    Operation("post", _UPLOADS, "Begin a file that comes in parts", "UploadRequest", "Upload"),
    Operation(
        "post", f"{_UPLOADS}/{{id}}/parts", "Add a part", "PartForm", "UploadPart", body_type="multipart/form-data"
    ),
    Operation("post", f"{_UPLOADS}/{{id}}/complete", "Make the parts one file", "UploadCompletion", "Upload"),
    Operation("post", f"{_UPLOADS}/{{id}}/cancel", "Cancel an upload", None, "Upload"),
    Operation("post", "/v1/batches", "Create a batch", "BatchRequest", "Batch", parameters=("idempotency-key",)),
    Operation("get", "/v1/batches", "List batches, the newest first", None, "List", parameters=("limit", "after")),
    Operation("get", "/v1/batches/{id}", "Retrieve a batch", None, "Batch"),
    Operation("post", "/v1/batches/{id}/cancel", "Cancel a batch", None, "Batch"),
    *(
        replace(operation, form="AnthropicError")
        for operation in (
            Operation("post", _MESSAGE_BATCHES, "Create a message batch", "MessageBatchRequest", "MessageBatch"),
            Operation(
                "get", _MESSAGE_BATCHES, "List message batches, the newest first", None, "List",
                parameters=("limit", "after_id", "before_id"),
            ),
            Operation("get", f"{_MESSAGE_BATCHES}/{{id}}", "Retrieve a message batch", None, "MessageBatch"),
            Operation("delete", f"{_MESSAGE_BATCHES}/{{id}}", "Delete a message batch", None, "DeletedMessageBatch"),
            Operation("post", f"{_MESSAGE_BATCHES}/{{id}}/cancel", "Cancel a message batch", None, "MessageBatch"),
            Operation(
                "get", f"{_MESSAGE_BATCHES}/{{id}}/results", "Download its results", media_type="application/x-jsonl"
            ),
        )
    ),
    Operation("get", "/v1/models", "List the models", None, "List", parameters=("anthropic-version",)),
    Operation("get", "/v1/models/{id}", "Retrieve a model", None, "Model", parameters=("anthropic-version",)),
    Operation("get", "/health", "Check that the process runs", media_type="text/plain", is_open=True),
    Operation("get", "/healthz", "Check that the process runs", media_type="text/plain", is_open=True),
    Operation("get", "/readyz", "Check that requests are answered", media_type="text/plain", is_open=True),
    Operation("get", "/metrics", "Read metrics for Prometheus", media_type="text/plain", is_open=True),
    Operation("get", "/", "Open the chat in the browser", media_type="text/html", is_open=True),
    Operation("get", "/openapi.json", "Read this document", answer="Document", is_open=True),
)  # fmt: skip


def _parameter(name: str, place: str, about: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "description": about, "schema": schema}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_PARAMETERS = {
    parameter["name"]: parameter
    for parameter in (
        _parameter("idempotency-key", "header", "A request that is sent again with its key joins its first job.",
                   {"type": "string", "minLength": 1, "maxLength": 255}),
        _parameter("last-event-id", "header", "The id of the last event that the client has.", _TEXT),
        _parameter("anthropic-version", "header", "A date; 2023-06-01 or later.", _TEXT),
        _parameter("anthropic-beta", "header", "Not read.", _TEXT),
        _parameter("include_usage", "query", "If the last chunk has the usage.", {"type": "boolean"}),
        _parameter("stream", "query", "If the response is streamed.", {"type": "boolean"}),
        _parameter("starting_after", "query", "The number of the last event that the client has.", _COUNT),
        _parameter("limit", "query", "Items in a page.", {"type": "integer", "minimum": 1, "maximum": 100}),
        _parameter("order", "query", "The newest item first, or last.", {"enum": ["asc", "desc"]}),
        _parameter("purpose", "query", "Files of this purpose alone.", {"enum": ["batch", "batch_output"]}),
        _parameter("range", "header", "The bytes to download, as `bytes=0-999`.", _TEXT),
        _parameter("if-none-match", "header", "The ETag of the content that the client has.", _TEXT),
        _parameter("after_id", "query", "The id of the last batch of the page before.", _TEXT),
        _parameter("before_id", "query", "The id of the first batch of the page after.", _TEXT),
        _parameter("after", "query", "The id of the last item of the page before.", _TEXT),
    )
}  # fmt: skip
_ID: Schema = {**_parameter("id", "path", "The id.", {"type": "string", "minLength": 1}), "required": True}


def document() -> Schema:
    """Return the document."""
    paths = dict[str, Schema]()
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sluice", "version": VERSION, "description": _ABOUT},
        "servers": [{"url": "/"}],
        "security": [{"key": []}, {"x-api-key": []}, {}],  # a gateway without keys needs none
        "paths": paths,
        "components": {
            "schemas": dict(sorted({**bodies(), **_ANSWERS}.items())),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation) -> Schema:
    path = [_ID] if "{id}" in operation.path else []
    parameters = [*path, *(_PARAMETERS[name] for name in operation.parameters)]
    body = {"required": True, "content": _json(operation.body, operation.body_type)} if operation.body else None
    parts = {"parameters": parameters, "requestBody": body, "security": [] if operation.is_open else None}
    return {
        "summary": operation.summary,
        **{name: part for name, part in parts.items() if part is not None and (part or name == "security")},
        "responses": {
            "200": {"description": "The answer.", "content": _content(operation)},
            "default": {"description": "An error.", "content": _error(operation)},
        },
    }


def _content(operation: Operation) -> Schema:
    whole = _json(operation.answer) if operation.answer else {}
    events = {"text/event-stream": {"schema": _TEXT}} if operation.streams else {}
    return {**whole, **events} or {operation.media_type: {"schema": _TEXT}}


def _error(operation: Operation) -> Schema:
    return {"text/plain": {"schema": _TEXT}} if operation.is_open else _json(operation.form)


def _json(name: str, media_type: str = "application/json") -> Schema:
    return {media_type: {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _object(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": [*required]}


_LIST: Schema = {"type": "array"}
_OBJECT: Schema = {"type": "object"}
_UNIX: Schema = {"type": "integer", "description": "Unix seconds."}
_EXPIRES = _object(
    {"anchor": {"const": "created_at"}, "seconds": {"type": "integer", "minimum": 3_600, "maximum": 2_592_000}}
)
_ANSWERS: dict[str, Schema] = {
    "Error": _object(
        {"error": _object({
            "message": _TEXT,
            "type": _TEXT,
            "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "null"]},
        })}
    ),
    "AnthropicError": _object(
        {"type": {"const": "error"}, "error": _object({"type": _TEXT, "message": _TEXT}), "request_id": _TEXT}
    ),
    "ChatCompletion": _object({
        "id": _TEXT, "object": {"const": "chat.completion"}, "created": _UNIX, "model": _TEXT, "choices": _LIST,
        "usage": _OBJECT,
    }),
    "Response": _object({
        "id": _TEXT, "object": {"const": "response"}, "created_at": _UNIX, "model": _TEXT, "output": _LIST,
        "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    }),
    "Message": _object({
        "id": _TEXT, "type": {"const": "message"}, "role": {"const": "assistant"}, "model": _TEXT,
        "content": _LIST, "stop_reason": {"type": ["string", "null"]}, "usage": _OBJECT,
    }),
    "Embeddings": _object({"object": {"const": "list"}, "model": _TEXT, "data": _LIST, "usage": _OBJECT}),
    "TokenCount": _object({"input_tokens": _COUNT}),
    "Cancelled": _object({"id": _TEXT, "outcome": {"enum": ["cancelled", "requested", "ended"]}}),
    "Deleted": _object({"id": _TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
    "DeletedFile": _object({"id": _TEXT, "object": {"const": "file"}, "deleted": {"const": True}}),
    "FileForm": _object(
        {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}, expires_after=_EXPIRES
    ),
    "File": _object({
        "id": _TEXT, "object": {"const": "file"}, "bytes": _COUNT, "created_at": _UNIX, "filename": _TEXT,
        "purpose": {"enum": ["batch", "batch_output"]}, "expires_at": {"type": ["integer", "null"]},
    }),
    "UploadRequest": _object(
        {"purpose": {"const": "batch"}, "filename": _TEXT, "bytes": _COUNT, "mime_type": _TEXT}, expires_after=_EXPIRES
    ),
    "PartForm": _object({"data": {"type": "string", "format": "binary"}}),
    "UploadPart": _object({
        "id": _TEXT, "object": {"const": "upload.part"}, "created_at": _UNIX, "upload_id": _TEXT,
    }),
    "UploadCompletion": _object({"part_ids": {**_LIST, "items": _TEXT}}, md5={"type": ["string", "null"]}),
    "Upload": _object({
        "id": _TEXT, "object": {"const": "upload"}, "bytes": _COUNT, "created_at": _UNIX, "expires_at": _UNIX,
        "filename": _TEXT, "purpose": {"const": "batch"}, "status": {"enum": ["pending", "completed", "cancelled"]},
        "file": {"anyOf": [{"$ref": "#/components/schemas/File"}, {"type": "null"}]},
    }),
    "BatchRequest": _object(
        {"input_file_id": _TEXT, "endpoint": _TEXT, "completion_window": _TEXT},
        metadata={"type": ["object", "null"], "additionalProperties": _TEXT},
        output_expires_after=_EXPIRES,
    ),
    "Batch": _object({
        "id": _TEXT, "object": {"const": "batch"}, "endpoint": _TEXT, "completion_window": _TEXT, "status": _TEXT,
        "created_at": _UNIX, "request_counts": _OBJECT,
    }),
    "MessageBatchRequest": _object(
        {"requests": {**_LIST, "items": _object({"custom_id": _TEXT, "params": _OBJECT})}}
    ),
    "MessageBatch": _object({
        "id": _TEXT, "type": {"const": "message_batch"}, "created_at": _TEXT, "expires_at": _TEXT,
        "processing_status": {"enum": ["in_progress", "canceling", "ended"]}, "request_counts": _OBJECT,
    }),
    "DeletedMessageBatch": _object({"id": _TEXT, "type": {"const": "message_batch_deleted"}}),
    "List": _object({"data": _LIST}),
    "Model": _object({"id": _TEXT}),
    "Document": _OBJECT,
}  # fmt: skip


def text() -> str:
    """Return the contents of the file."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"
