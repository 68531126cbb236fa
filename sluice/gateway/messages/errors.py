"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway import errors
from sluice.gateway.errors import ApiError, Handler
from sluice.openai import CONTEXT_EXCEEDED

ID_PREFIX = "msg_"
_OVERLOADED = 529  # Anthropic's status; its SDK retries it
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "  # Claude Code compacts its conversation after a 400 whose message begins so


def status_of(error: ApiError) -> int:
    """Return the HTTP status: Anthropic's where it differs from OpenAI's."""
    return _OVERLOADED if error.status == 503 else error.status


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the body of an error, which is also the data of an `error` event."""
    status = status_of(error)
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = f"{_TOO_LONG}{error.message}" if error.code == CONTEXT_EXCEEDED else error.message
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_response(error: ApiError, request_id: str) -> Response:
    """Return the HTTP response of an error."""
    headers = {**error.headers, **id_headers(request_id)}
    return JSONResponse(error_body(error, request_id), status_of(error), headers)


def new_id() -> str:
    """Return a new id of a request, which is also that of its job."""
    return f"{ID_PREFIX}{uuid.uuid4().hex}"


def id_headers(request_id: str) -> dict[str, str]:
    """Return the headers that carry the id of a request."""
    return {"request-id": request_id, "x-request-id": request_id}


def endpoint(handler: Handler) -> Handler:
    """Return the handler with an id for each request, `request.state.request_id`, which it may replace, and with its
    errors in Anthropic's form."""

    async def identified(request: Request) -> Response:
        request.state.request_id = new_id()

        def render(error: ApiError) -> Response:
            return error_response(error, request.state.request_id)

        return await errors.endpoint(handler, render)(request)

    return identified
