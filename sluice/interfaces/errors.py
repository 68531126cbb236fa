"""Errors of the interfaces, and OpenAI's and Anthropic's form of them."""

import math
from typing import Any

from redis.exceptions import RedisError

from sluice.contract.refusals import is_full
from sluice.errors import ServerUnreachable, SluiceError
from sluice.http_errors import ErrorForm
from sluice.openai import error_reply, is_of_image
from sluice.transport import is_transient, server_full


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


def openai_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form."""
    form = error.form
    return {"error": {"message": str(error), "type": form.type, "param": error.param, "code": form.code}}


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form, which is also the data of an `error` event."""
    is_image = is_of_image(error.param) and error.form.status == 400
    form = ErrorForm.BAD_IMAGE if is_image else error.form
    told = {"type": form.anthropic_type, "message": f"{form.anthropic_begins}{error.message}"}
    return {"type": "error", "error": told, "request_id": request_id}
