"""The application: the routes of all interfaces."""

import logging
import re
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.client import Client
from sluice.gateway import catalog, chat, messages, openapi, page, responses
from sluice.gateway.catalog import ANTHROPIC_HEADER
from sluice.gateway.errors import ApiError, anthropic_response, new_id, openai_response
from sluice.gateway.gateway import Gateway
from sluice.gateway.monitoring import health
from sluice.gateway.monitoring.access import REQUEST_ID, AccessLog
from sluice.gateway.protection.middleware import Protection
from sluice.gateway.settings import ServeSettings
from sluice.http_errors import ErrorForm

logger = logging.getLogger("sluice.gateway")

RoutesOf = Callable[[Gateway], Sequence[Route]]

INTERFACES: Sequence[RoutesOf] = (
    chat.routes,
    responses.routes,
    messages.routes,
    catalog.routes,
    health.routes,
    openapi.routes,
    page.routes,
)


def app(client: Client, settings: ServeSettings | None = None) -> Starlette:
    """Return the application, to be served or mounted. The caller closes the client.

    `settings` are read from the environment if they are not given. `app.state.gateway` is the `Gateway`. Raises
    `BadKeyFile`.
    """
    gateway = Gateway(client, settings or ServeSettings())
    routes = [route for interface in INTERFACES for route in interface(gateway)]
    paths = {route.endpoint: route.path for route in routes}
    application = Starlette(
        routes=routes,
        middleware=[
            Middleware(_ClientPath),
            Middleware(AccessLog, metrics=gateway.metrics, paths=paths),
            *_protection(gateway.settings),
        ],
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )
    application.state.gateway = gateway
    return application


class _ClientPath:
    """ASGI middleware: reads a path as its client meant it. A base URL that ends in `/` makes `//v1/...`, and one that
    ends in `/v1`, with a client that adds that, `/v1/v1/...`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root = scope.get("root_path", "")
            scope["path"] = root + meant_path(scope["path"].removeprefix(root))
        await self._app(scope, receive, send)


def meant_path(path: str) -> str:
    """Return a path with single slashes, one `/v1` at its beginning, and no slash at its end. A model's id in it stays
    as it is."""
    path = re.sub(r"^/+(?:v1/+)+", "/v1/", path)
    if re.match(r"/v1/models/[^/]", path):
        return path
    return re.sub(r"/+", "/", path).rstrip("/") or "/"


def _protection(settings: ServeSettings) -> list[Middleware]:
    protection = Middleware(Protection, timeout_s=settings.client_timeout_s)
    if not settings.allowed_origins:
        return [protection]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=sorted(settings.allowed_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["*"],
    )
    return [cors, protection]


async def _refused(request: Request, error: Exception) -> Response:
    """Return Starlette's own refusals, such as of an unknown path."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "POST" and _ends_in_an_id(request):
        error = HTTPException(404)  # the last name is no id but that of a route which we do not have: responses/compact
    meant = f"/v1{request.scope['path'].removeprefix(request.scope.get('root_path', ''))}"
    is_known = error.status_code == 404 and meant in [route.path for route in request.app.routes]
    hint = f" The path is {meant}: add /v1 to the base URL." if is_known else ""
    message = f"{request.method} {request.url.path[:200]}: {error.detail}.{hint}"
    return _response(request, ApiError(ErrorForm.NO_METHOD if error.status_code == 405 else ErrorForm.NO_PATH, message))


def _ends_in_an_id(request: Request) -> bool:
    """Return True if the path is that of one stored object."""
    path = request.scope["path"]
    return any(path.endswith(f"/{value}") for value in request.path_params.values())


async def _failed(request: Request, error: Exception) -> Response:
    """Return an error of the gateway itself. The HTTP server logs it."""
    error = ApiError(ErrorForm.FAILED, "The gateway failed on this request; its log has the reason.")
    return _response(request, error, getattr(request.state, REQUEST_ID))


def _response(request: Request, error: ApiError, id: str | None = None) -> Response:
    """Return the error in Anthropic's form to its clients, and in OpenAI's to all others."""
    is_anthropic = ANTHROPIC_HEADER in request.headers or request.url.path.startswith("/v1/messages")
    if is_anthropic:
        return anthropic_response(error, id or new_id())
    response = openai_response(error)
    if id is not None:
        response.headers["x-request-id"] = id
    return response
