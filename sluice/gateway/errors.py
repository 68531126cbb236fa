"""Errors as HTTP responses, in OpenAI's and in Anthropic's form."""

import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response

from sluice.contract.refusals import is_full, reason_of
from sluice.errors import ServerUnreachable, SluiceError
from sluice.interfaces.errors import ApiError, anthropic_body, from_client, openai_body
from sluice.transport import is_transient

logger = logging.getLogger("sluice.gateway")

RETRY_S = 1.0  # until what refuses a request may have passed: another request that ends, another gateway that answers


def was_refused(error: BaseException | None) -> bool:
    """Return True if a submission that ended with this error has certainly queued nothing."""
    if isinstance(error, ApiError | SluiceError):
        return not isinstance(error, ServerUnreachable)
    return error is not None and is_full(error)


def log_refusal(error: SluiceError | RedisError) -> None:
    """Log an error of the server that clients are not shown: a missing permission, a wrong password."""
    if not isinstance(error, SluiceError) and not is_transient(error):
        logger.error("the server of the queue refused a request: %s", reason_of(error) or error, exc_info=error)


def openai_response(error: ApiError) -> Response:
    """Return the HTTP response of an error in OpenAI's form."""
    return _json(openai_body(error), error.form.status, error.headers)


def _json(body: Mapping[str, Any], status: int, headers: Mapping[str, str]) -> Response:
    """Return a JSON response. Half a surrogate pair of a client's text is written as an escape, as all but ASCII is."""
    return Response(json.dumps(body), status, headers, "application/json")


Handler = Callable[[Request], Awaitable[Response]]


def endpoint(handler: Handler, render: Callable[[ApiError], Response] = openai_response) -> Handler:
    """Return the handler with its errors, and the client library's, rendered in the form of an interface."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return render(error)
        except (SluiceError, RedisError) as error:
            log_refusal(error)
            return render(from_client(error))

    return guarded


def anthropic_response(error: ApiError, request_id: str) -> Response:
    """Return the HTTP response of an error in Anthropic's form."""
    headers = {**error.headers, **id_headers(request_id)}
    return _json(anthropic_body(error, request_id), error.form.anthropic_status, headers)


def new_id() -> str:
    """Return a new id of a request in Anthropic's form, which is also that of its job."""
    return f"msg_{uuid.uuid4().hex}"


def id_headers(request_id: str) -> dict[str, str]:
    """Return the headers that carry the id of a request in Anthropic's form."""
    return {"request-id": request_id, "x-request-id": request_id}


def anthropic_endpoint(handler: Handler) -> Handler:
    """Return the handler with an id for each request, `request.state.request_id`, which it may replace, and with its
    errors in Anthropic's form."""

    async def identified(request: Request) -> Response:
        request.state.request_id = new_id()

        def render(error: ApiError) -> Response:
            return anthropic_response(error, request.state.request_id)

        return await endpoint(handler, render)(request)

    return identified
