"""The access log and the request metrics: a line for each response, without bodies, queries or keys."""

import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.gateway.monitoring.metrics import Metrics

logger = logging.getLogger("sluice.gateway.access")

_METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})
_MAX_PATH = 200  # characters
_BROKEN_OFF = 499  # the status that proxies log if the client leaves before a response
_FAILED = 500  # the status that Starlette, outside of this middleware, answers an exception with
REQUEST_ID = "access_log_id"  # in the state of a request: the id of a response that sets none
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})


class AccessLog:
    """Logs and counts each response, and gives it an `x-request-id` if it has none."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Mapping[Any, str]) -> None:
        """`paths`: the path of each route, by its endpoint."""
        self._app = app
        self._metrics, self._paths = metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        response = _Response(send)
        scope.setdefault("state", {})[REQUEST_ID] = response.request_id
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

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = _BROKEN_OFF
        self.request_id = f"req-{uuid.uuid4().hex}"

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.setdefault("x-request-id", self.request_id)
            self.request_id = headers["x-request-id"]
        await self._send(message)

    def failed(self) -> None:
        """Note an exception: the status is 500 unless a response has begun."""
        if self.status == _BROKEN_OFF:
            self.status = _FAILED
