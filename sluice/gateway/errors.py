"""Errors of the gateway, and OpenAI's and Anthropic's form of them."""

import logging
import math
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.contract.refusals import is_full, reason_of
from sluice.errors import ServerUnreachable, SluiceError
from sluice.http_errors import ErrorForm
from sluice.openai import error_reply, is_of_image
from sluice.transport import is_transient, server_full

logger = logging.getLogger("sluice.gateway")

RETRY_S = 1.0  # until what refuses a request may have passed: another request that ends, another gateway that answers


class ApiError(Exception):
    """An HTTP error. `retryable` None follows from its form."""

    def __init__(
        self,
        form: ErrorForm,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        retryable: bool | None = None,
    ) -> None:
        """`message`: what follows the words that errors of this form begin with."""
        super().__init__(form, message)  # what pickle and `copy` call the constructor with
        self.form = form
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.retryable = form.is_retried if retryable is None else retryable

    def __str__(self) -> str:
        return f"{self.form.begins}{self.message}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that tell clients if and when to retry."""
        wait = {} if self.retry_after_s is None else {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}
        return {"x-should-retry": str(self.retryable).lower(), **wait}


def from_client(error: SluiceError | RedisError) -> ApiError:
    """Return the HTTP error for an error of the client library."""
    if not isinstance(error, SluiceError):
        if is_transient(error):
            unreachable = ServerUnreachable(str(error))
            unreachable.__cause__ = error
            return from_client(unreachable)
        if is_full(error):
            return from_client(server_full(error))
        return ApiError(ErrorForm.INTERNAL, "The server of the queue refused a request; the log has the reason.")
    reply = error_reply(error)
    body = reply.body["error"]
    return ApiError(
        reply.form,
        body["message"].removeprefix(reply.form.begins),
        param=body["param"],
        retry_after_s=float(reply.headers["retry-after"]) if "retry-after" in reply.headers else None,
        retryable=reply.headers["x-should-retry"] == "true",
    )


def was_refused(error: BaseException | None) -> bool:
    """Return True if a submission that ended with this error has certainly queued nothing."""
    if isinstance(error, ApiError | SluiceError):
        return not isinstance(error, ServerUnreachable)
    return error is not None and is_full(error)


def log_refusal(error: SluiceError | RedisError) -> None:
    """Log an error of the server that clients are not shown: a missing permission, a wrong password."""
    if not isinstance(error, SluiceError) and not is_transient(error):
        logger.error("the server of the queue refused a request: %s", reason_of(error) or error, exc_info=error)


def openai_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form."""
    form = error.form
    return {"error": {"message": str(error), "type": form.type, "param": error.param, "code": form.code}}


def openai_response(error: ApiError) -> Response:
    """Return the HTTP response of an error in OpenAI's form."""
    return JSONResponse(openai_body(error), error.form.status, error.headers)


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


ANTHROPIC_ID_PREFIX = "msg_"


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form, which is also the data of an `error` event."""
    is_image = is_of_image(error.param) and error.form.status == 400
    form = ErrorForm.BAD_IMAGE if is_image else error.form
    told = {"type": form.anthropic_type, "message": f"{form.anthropic_begins}{error.message}"}
    return {"type": "error", "error": told, "request_id": request_id}


def anthropic_response(error: ApiError, request_id: str) -> Response:
    """Return the HTTP response of an error in Anthropic's form."""
    headers = {**error.headers, **id_headers(request_id)}
    return JSONResponse(anthropic_body(error, request_id), error.form.anthropic_status, headers)


def new_id() -> str:
    """Return a new id of a request in Anthropic's form, which is also that of its job."""
    return f"{ANTHROPIC_ID_PREFIX}{uuid.uuid4().hex}"


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
