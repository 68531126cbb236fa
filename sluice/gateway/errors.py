"""Errors of the gateway, independent of an interface; and OpenAI's form of them."""

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.contract.refusals import is_full, reason_of
from sluice.errors import JobFailed, NoWorker, QueueFull, ServerFull, ServerUnreachable, SluiceError
from sluice.openai import error_reply
from sluice.transport.retries import is_transient, server_full

logger = logging.getLogger("sluice.gateway")

INVALID = "invalid_request_error"
SERVER = "server_error"
NO_WORKER_RETRY_S = 5.0  # a worker that restarts loads its model first
_FULL_RETRY_S = 5.0  # jobs that end free memory all the time


class ApiError(Exception):
    """An HTTP error. `kind` is OpenAI's `type`; `retryable` None follows from the status."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(status, message, kind)  # what pickle and `copy` call the constructor with
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.retryable = status in (408, 429) or status >= 500 if retryable is None else retryable

    def __str__(self) -> str:
        return self.message

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
        message = "The server of the queue refused a request; the log has the reason."
        return ApiError(500, message, SERVER, code="internal")
    reply = error_reply(error)
    body = reply.body["error"]
    return ApiError(
        reply.status,
        body["message"],
        body["type"],
        code=body["code"],
        param=body["param"],
        retry_after_s=_wait_s(error),
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


def _wait_s(error: SluiceError) -> float | None:
    match error:
        case QueueFull(retry_after_s=wait_s):
            return wait_s
        case ServerFull():
            return _FULL_RETRY_S
        case NoWorker(served=()):
            return NO_WORKER_RETRY_S
        case JobFailed(error=failed) if failed.type == "overloaded":
            return NO_WORKER_RETRY_S
    return None


def openai_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def openai_response(error: ApiError) -> Response:
    """Return the HTTP response of an error in OpenAI's form."""
    return JSONResponse(openai_body(error), error.status, error.headers)


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
