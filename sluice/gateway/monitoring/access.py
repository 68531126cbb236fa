"""The access log and the request metrics: a line for each response, without bodies, queries or keys."""

import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.gateway.monitoring.metrics import GatewayMetrics

logger = logging.getLogger("sluice.gateway.access")

_METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})
_MAX_PATH = 200  # characters
_BROKEN_OFF = 499  # the status that proxies log if the client leaves before a response
_FAILED = 500  # the status that Starlette, outside of this middleware, answers an exception with
REQUEST_ID = "access_log_id"  # in the state of a request: its job's id, or else one that is made here
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})


def identify(request: Request, job_id: str) -> None:
    """Make the id of a request's job the `x-request-id` of its response, also if that is an error."""
    setattr(request.state, REQUEST_ID, job_id)


class AccessLog:
    """Logs and counts each response, and gives it an `x-request-id` if it has none."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, paths: Mapping[Any, str]) -> None:
        """`paths`: the path of each route, by its endpoint."""
        self._app = app
        self._metrics, self._paths = metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        response = _Response(send, scope.setdefault("state", {}))
        started = time.monotonic()
        self._metrics.began()
        try:
            await self._app(scope, receive, response.send)
        except Exception:  # the border of a gateway's request: Starlette answers 500 and the server logs the error
            response.failed()
            raise
        finally:
            self._record(scope, response, time.monotonic() - started)

    def _record(self, scope: Scope, response: "_Response", seconds: float) -> None:
        handler = self._paths.get(scope.get("endpoint"), "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.ended(method, handler, response.status, seconds)
        level = logging.DEBUG if handler in _QUIET else logging.INFO
        path = quote(scope["path"][:_MAX_PATH])
        logger.log(level, "%s %s %d %.3f s %s", method, path, response.status, seconds, response.request_id)


class _Response:
    """Watches the messages of one response."""

    def __init__(self, send: Send, state: dict[str, Any]) -> None:
        """`state`: of the request, which gets an id here."""
        self._send, self._state = send, state
        self._state[REQUEST_ID] = f"req-{uuid.uuid4().hex}"
        self.status = _BROKEN_OFF

    @property
    def request_id(self) -> str:
        """The `x-request-id` of the response."""
        return str(self._state[REQUEST_ID])

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            self._state[REQUEST_ID] = headers.setdefault("x-request-id", self.request_id)
        await self._send(message)

    def failed(self) -> None:
        """Note an exception: the status is 500 unless a response has begun."""
        if self.status == _BROKEN_OFF:
            self.status = _FAILED
