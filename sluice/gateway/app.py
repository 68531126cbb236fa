"""The application: the routes of all surfaces."""

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.client import Client
from sluice.gateway import chat
from sluice.gateway.errors import ApiError, openai_response
from sluice.gateway.gateway import Gateway
from sluice.gateway.settings import ServeSettings

Surface = Callable[[Gateway], Sequence[Route]]

SURFACES: Sequence[Surface] = (chat.routes,)


def app(client: Client, settings: ServeSettings | None = None) -> Starlette:
    """Return the application, to be served or mounted. The caller closes the client."""
    gateway = Gateway(client, settings or ServeSettings())
    routes = [route for surface in SURFACES for route in surface(gateway)]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refused})


async def _refused(request: Request, error: Exception) -> Response:
    """Return Starlette's own refusals, such as of an unknown path, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}."
    return openai_response(ApiError(error.status_code, message, code=None))
