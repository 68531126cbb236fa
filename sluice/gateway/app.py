"""The application: the routes of all interfaces."""

import logging
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.client import Client
from sluice.gateway import catalog, chat, messages, openapi, page, responses
from sluice.gateway.errors import SERVER, ApiError, openai_response
from sluice.gateway.gateway import Gateway
from sluice.gateway.messages.errors import error_response, new_id
from sluice.gateway.messages.models import HEADER as ANTHROPIC_HEADER
from sluice.gateway.monitoring import health
from sluice.gateway.monitoring.access import REQUEST_ID, AccessLog
from sluice.gateway.protection.middleware import Protection
from sluice.gateway.settings import ServeSettings

logger = logging.getLogger("sluice.gateway")

Interface = Callable[[Gateway], Sequence[Route]]

INTERFACES: Sequence[Interface] = (
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
        middleware=[Middleware(AccessLog, metrics=gateway.metrics, paths=paths), *_protection(gateway.settings)],
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )
    application.state.gateway = gateway
    return application


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
    message = f"{request.method} {request.url.path[:200]}: {error.detail}."
    return _response(request, ApiError(error.status_code, message, code=None))


async def _failed(request: Request, error: Exception) -> Response:
    """Return an error of the gateway itself. The HTTP server logs it."""
    error = ApiError(500, "The gateway failed on this request; its log has the reason.", SERVER)
    return _response(request, error, getattr(request.state, REQUEST_ID))


def _response(request: Request, error: ApiError, id: str | None = None) -> Response:
    """Return the error in Anthropic's form to its clients, and in OpenAI's to all others."""
    is_anthropic = ANTHROPIC_HEADER in request.headers or request.url.path.startswith("/v1/messages")
    if is_anthropic:
        return error_response(error, id or new_id())
    response = openai_response(error)
    if id is not None:
        response.headers["x-request-id"] = id
    return response
