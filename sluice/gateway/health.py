"""`/healthz` or `/health`, `/readyz`, `/metrics`. They need no key: keep them from the public at the load balancer."""

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from sluice.contract.refusals import reason_of
from sluice.gateway.gateway import Gateway

_ALIVE = ("/health", "/healthz")  # the first is what servers of models have, and what benchmarks for them ask for


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of the probes and the metrics."""

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        if gateway.draining:
            return PlainTextResponse("draining\n", 503)
        try:
            async with asyncio.timeout(2.0):
                await gateway.client.ping()
        except (RedisError, TimeoutError) as error:
            reason = reason_of(error)
            problem = f"cannot be used: {reason}" if reason else "does not answer"
            return PlainTextResponse(f"the server of the queue {problem}\n", 503)
        return PlainTextResponse("ok\n")

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return [*(Route(path, healthz) for path in _ALIVE), Route("/readyz", readyz), Route("/metrics", metrics)]
