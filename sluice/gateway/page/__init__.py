"""The page at `/`: a chat in the browser, as an ordinary client of the gateway's own routes."""

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.gateway.gateway import Gateway

_TYPES = {".css": "text/css", ".js": "text/javascript", ".html": "text/html", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def routes(gateway: Gateway) -> list[Route]:
    """Return the page and its files. They hold nothing secret, so they need no key."""
    return [Route("/", _index), *(Route(f"/page/{name}", _file) for name in _contents() if name != "index.html")]


async def _index(request: Request) -> Response:
    return _response("index.html")


async def _file(request: Request) -> Response:
    return _response(request.url.path.rpartition("/")[2])


def _response(name: str) -> Response:
    return Response(_contents()[name], headers=_HEADERS, media_type=_TYPES[f".{name.rpartition('.')[2]}"])


@cache
def _contents() -> dict[str, bytes]:
    """Return the files by name."""
    found = (files(__package__) / "static").iterdir()
    return {file.name: file.read_bytes() for file in found}
