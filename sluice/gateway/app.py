"""The application: the routes of all interfaces, what surrounds them, and the server that runs them."""

import asyncio
import errno
import gc
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, nullcontext, suppress
from types import FrameType

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.client import Client
from sluice.contract.redis_url import MapFile
from sluice.contract.refusals import reason_of
from sluice.gateway import batches, catalog, chat, embeddings, messages, openapi, page, responses
from sluice.gateway.caller import limit_headers
from sluice.gateway.catalog import ANTHROPIC_HEADER
from sluice.gateway.errors import anthropic_response, new_id, openai_response
from sluice.gateway.gateway import Gateway
from sluice.gateway.key_file import BadKeyFile
from sluice.gateway.monitoring import REQUEST_ID, AccessLog, WebhookMetrics
from sluice.gateway.protection import MAX_HEADER_BYTES, MIN_BYTES_PER_S, LocalOnly, at_end, protocol
from sluice.gateway.settings import (
    ENV_FILE,
    REDIS_URL,
    REDIS_URLS,
    CannotServe,
    ServeSettings,
    read_log_format,
    read_variables,
)
from sluice.gateway.sse import CONNECTION
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError
from sluice.log_lines import set_up_logging
from sluice.mapped import open_client
from sluice.service_status import serving
from sluice.tracing import Tracing, TracingError, open_tracing
from sluice.webhooks.deliverer import deliver
from sluice.webhooks.store import Counts, WebhookStore

logger = logging.getLogger("sluice.gateway")


class _Protection:
    """ASGI middleware: limits the time of a body, adds the headers about limits, and frees what a request held."""

    def __init__(self, app: ASGIApp, *, timeout_s: float) -> None:
        """`timeout_s`: seconds that any body may take; a longer one has to arrive with 10 kB/s."""
        self._app, self._timeout_s = app, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        state[CONNECTION] = receive
        stack = at_end(Request(scope))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(await limit_headers(state, scope["path"]))
            await send(message)

        with stack:
            await self._app(scope, _TimedBody(receive, self._timeout_s), send_with_headers)


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
        self._deadline += len(message.get("body", b"")) / MIN_BYTES_PER_S
        return message


_ALIVE = ("/health", "/healthz")  # the first is what servers of models have, and what benchmarks for them ask for


def _probes(gateway: Gateway) -> list[Route]:
    """Return the routes of the probes and the metrics. They need no key: keep them from the public at the load
    balancer."""

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
        measured = gateway.metrics
        await asyncio.gather(measured.queues.read(gateway.client), measured.runs.read(gateway.client.batches))
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return [*(Route(path, healthz) for path in _ALIVE), Route("/readyz", readyz), Route("/metrics", metrics)]


RoutesOf = Callable[[Gateway], Sequence[Route]]

INTERFACES: Sequence[RoutesOf] = (
    chat.routes,
    responses.routes,
    messages.routes,
    embeddings.routes,
    batches.routes,
    catalog.routes,
    _probes,
    openapi.routes,
    page.routes,
)


def app(client: Client, settings: ServeSettings | None = None, tracing: Tracing | None = None) -> Starlette:
    """Return the application, to be served or mounted. The caller closes the client.

    `settings` are read from the environment if they are not given. `tracing` makes a span of each request; without,
    jobs belong to the current span of the application that this one is mounted in. `app.state.gateway` is the
    `Gateway`. Raises `BadKeyFile`.
    """
    gateway = Gateway(client, settings or ServeSettings())
    routes = [route for interface in INTERFACES for route in interface(gateway)]
    paths = {route.endpoint: route.path for route in routes}
    application = Starlette(
        routes=routes,
        middleware=[
            Middleware(_ClientPath),
            Middleware(AccessLog, metrics=gateway.metrics, paths=paths, tracing=tracing),
            *_middleware_of(gateway.settings),
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


def _middleware_of(settings: ServeSettings) -> list[Middleware]:
    protection = Middleware(_Protection, timeout_s=settings.client_timeout_s)
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


def run_gateway(redis_url: str, settings: ServeSettings) -> None:
    """Serve until Ctrl-C or SIGTERM, and finish the open responses. Raises `CannotServe`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))  # uvicorn raises its signal again when it has drained
    set_up_logging("sluice.gateway", "INFO", read_log_format())
    try:
        tracing = open_tracing("sluice-gateway", more=read_variables(ENV_FILE))
    except TracingError as error:
        raise CannotServe(str(error)) from None
    with listen(settings) as listening, closing(tracing) if tracing else nullcontext():
        asyncio.run(_serve(listening, redis_url, settings, tracing))


def listen(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens at the address of the settings. Raises `CannotServe`."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        problem = f"cannot listen on {settings.host} port {settings.port}: {_reason(error)}"
        raise CannotServe(problem) from None


def _reason(error: OSError) -> str:
    """Return why the gateway cannot listen, and what to change."""
    match error:
        case OSError(errno=errno.EADDRINUSE):
            return "another process listens there; choose another port with --port."
        case OSError(errno=errno.EACCES):
            return "this user may not listen there; choose a port from 1024 on with --port."
        case OSError(errno=errno.EADDRNOTAVAIL) | socket.gaierror():
            return "this machine does not have that address; choose another with --host."
    system = os.strerror(error.errno or 0)  # `strerror` of the error repeats the address
    return f"{system}; choose another with --host and --port."


async def _serve(listening: socket.socket, redis_url: str, settings: ServeSettings, tracing: Tracing | None) -> None:
    try:
        client = open_client(redis_url)
    except ValueError as error:
        variable = REDIS_URLS if isinstance(redis_url, MapFile) else REDIS_URL
        raise CannotServe(f"{variable}: {error}") from None
    async with client:
        application = _application(client, settings, tracing)
        config = uvicorn.Config(
            application if settings.keys else LocalOnly(application, settings.allowed_origins),
            http=protocol(settings.client_timeout_s),
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(settings.drain_s),
        )
        if settings.keys is None:
            print("sluice: no keys are set (SLUICE_SERVE_KEYS), so only this machine is answered", file=sys.stderr)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        print(f"sluice: serving at http://{host}:{listening.getsockname()[1]}/v1", file=sys.stderr, flush=True)
        _collect_garbage_rarely()
        gateway = application.state.gateway
        webhooks = _delivering_webhooks(client, gateway.metrics.webhooks) if settings.webhooks else nullcontext()
        async with serving(), webhooks:
            await _Server(config, gateway).serve(sockets=[listening])


@asynccontextmanager
async def _delivering_webhooks(client: Client, metrics: WebhookMetrics) -> AsyncIterator[None]:
    """Deliver webhooks, and measure what waits, until the end of the block."""
    tasks = [
        asyncio.create_task(deliver(client, metrics.ended)),
        asyncio.create_task(_measure_webhooks(client, metrics)),
    ]
    for task in tasks:
        task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        logger.error("this gateway delivers or measures no more webhooks; please report it", exc_info=error)


async def _measure_webhooks(client: Client, metrics: WebhookMetrics) -> None:
    while True:
        with suppress(RedisError):  # the metrics keep what they were
            totals = [await WebhookStore(each.redis, each.retries).total() for each in client.servers]
            metrics.wait(sum(totals, Counts()))
        await asyncio.sleep(10.0)


def _collect_garbage_rarely() -> None:
    """Exempt the loaded modules from garbage collection, and let more be allocated between two collections: a burst of
    requests would run it all the time, and find nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # allocated containers between two collections, instead of 700


def _application(client: Client, settings: ServeSettings, tracing: Tracing | None) -> Starlette:
    try:
        return app(client, settings, tracing)
    except BadKeyFile as error:
        raise CannotServe(f"SLUICE_SERVE_KEYS: {error}") from None


class _Server(uvicorn.Server):
    """A uvicorn server that tells the gateway when it begins to drain."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, in a signal handler."""
        self._gateway.drain()
        super().handle_exit(sig, frame)
