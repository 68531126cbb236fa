"""A gateway without keys answers only to programs and pages of its own machine."""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.gateway.errors import ApiError, openai_response
from sluice.http_errors import ErrorForm

_REMEDY = "make a key with `sluice keys create` and set SLUICE_SERVE_KEYS."


def is_loopback(host: str) -> bool:
    """Return True for an address, or a name, that leads to this machine only."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class LocalOnly:
    """Refuses requests for other host names and from other sites' pages: a web page on the internet can make a browser
    send requests to 127.0.0.1, under a name of its own as well."""

    def __init__(self, app: ASGIApp, allowed_origins: frozenset[str] = frozenset()) -> None:
        self._app, self._allowed_origins = app, allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (openai_response(error) if error else self._app)(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if not is_loopback(_host(f"//{headers.get('host', '')}")):
            return ApiError(
                ErrorForm.NOT_ALLOWED, f"Host: this gateway has no keys and answers only to its own machine; {_REMEDY}"
            )
        origin = headers.get("origin")
        if origin is None or is_loopback(_host(origin)) or {"*", origin} & self._allowed_origins:
            return None
        problem = "Origin: this gateway has no keys and answers no pages of other sites; set SLUICE_SERVE_CORS_ORIGINS."
        return ApiError(ErrorForm.NOT_ALLOWED, problem)


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
