"""The routes of chat completions."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice import openai
from sluice.gateway import sse
from sluice.gateway.body import read_json
from sluice.gateway.errors import endpoint
from sluice.gateway.gateway import Gateway


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of chat completions."""
    chat = _Chat(gateway)
    return [Route("/v1/chat/completions", endpoint(chat.create), methods=["POST"])]


class _Chat:
    """Answers requests for chat completions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        caller = await self._gateway.authenticate(request)
        body = await read_json(request, self._gateway.settings.max_body_bytes)
        job = await self._gateway.submit(caller, body)
        headers = {"x-request-id": job.id}
        if not body.get("stream"):
            return JSONResponse(await self._gateway.result(job.id), headers=headers)
        chunks = openai.chunks(self._gateway.events(job.id), include_usage=openai.wants_usage(body))
        lines = _encoded(await openai.sse(chunks))
        return sse.response(sse.with_heartbeats(lines, self._gateway.settings.heartbeat_s), headers)


async def _encoded(lines: AsyncGenerator[str]) -> AsyncGenerator[bytes]:
    async with aclosing(lines):
        async for line in lines:
            yield line.encode()
