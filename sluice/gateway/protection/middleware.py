"""The middleware around every request: a time limit for the body, the headers about limits, and the release of what it
holds."""

import asyncio
from datetime import UTC, datetime

from redis.exceptions import RedisError
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.errors import SluiceError
from sluice.gateway.disconnect import CONNECTION, DISCONNECT_WATCH, DisconnectWatch
from sluice.gateway.errors import ApiError
from sluice.gateway.keys.limits import Balance, anthropic_headers, openai_headers
from sluice.gateway.keys.meter import Meter
from sluice.gateway.protection.memory import HeldBytes
from sluice.http_errors import ErrorForm

_MIN_BYTES_PER_S = 10_000  # of a body, after the first `timeout_s` seconds
_ANTHROPIC_PATH = "/v1/messages"


class Protection:
    """ASGI middleware: limits the time of a body, adds the headers about limits, and frees what a request held."""

    def __init__(self, app: ASGIApp, *, timeout_s: float) -> None:
        """`timeout_s`: seconds that any body may take; a longer one has to arrive with 10 kB/s."""
        self._app, self._timeout_s = app, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        state[CONNECTION] = receive

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and isinstance(meter := state.get("meter"), Meter):
                MutableHeaders(scope=message).update(await _headers(meter, scope["path"]))
            await send(message)

        try:
            await self._app(scope, _TimedBody(receive, self._timeout_s), send_with_headers)
        finally:
            if isinstance(meter := state.get("meter"), Meter):
                meter.leave()
            if isinstance(held := state.get("held"), HeldBytes):
                held.release()
            if isinstance(watch := state.get(DISCONNECT_WATCH), DisconnectWatch):
                watch.close()


class _TimedBody:
    """Receives messages; a body that arrives too slowly raises `ApiError` 408."""

    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self._receive, self._deadline = receive, asyncio.get_running_loop().time() + timeout_s
        self._more_body = True

    async def __call__(self) -> Message:
        if not self._more_body:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(ErrorForm.TIMEOUT, "The body did not arrive in time; send it faster.") from None
        self._more_body = message.get("more_body", False)
        self._deadline += len(message.get("body", b"")) / _MIN_BYTES_PER_S
        return message


async def _headers(meter: Meter, path: str) -> dict[str, str]:
    """Return the headers about the caller's limits; none if the server does not answer."""
    try:
        balance: Balance = await meter.balance()
    except (SluiceError, RedisError):
        return {}
    if path.startswith(_ANTHROPIC_PATH):
        return {**openai_headers(balance), **anthropic_headers(balance, datetime.now(UTC))}
    return openai_headers(balance)
