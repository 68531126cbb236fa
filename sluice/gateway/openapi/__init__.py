"""`/openapi.json`: the description of the gateway's routes for programs. `python -m docs.openapi` writes it."""

import json
from functools import lru_cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.gateway.gateway import Gateway


def routes(gateway: Gateway) -> list[Route]:
    """Return the route of the document. It holds nothing secret, so it needs no key."""
    return [Route("/openapi.json", _described)]


async def _described(request: Request) -> Response:
    mounted_at = request.scope.get("root_path") or "/"
    return Response(_document(mounted_at), media_type="application/json")


@lru_cache(maxsize=4)
def _document(mounted_at: str) -> bytes:
    """Return the document, with the place at which the application is mounted."""
    written = json.loads((files(__package__) / "static" / "openapi.json").read_bytes())
    return json.dumps({**written, "servers": [{"url": mounted_at}]}, separators=(",", ":")).encode()
