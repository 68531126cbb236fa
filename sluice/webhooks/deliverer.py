"""Sends events to their endpoints, again and again until they are received, for a day."""

import asyncio
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from httpcore2 import AsyncHTTPConnection, AsyncNetworkBackend, NetworkError, ProtocolError, Response, TimeoutException
from redis.exceptions import RedisError

from sluice import __version__
from sluice.client import Client
from sluice.network import BadUrl, NotPublic, PublicNetwork, Resolve, host_header, is_public, parse_url
from sluice.webhooks.endpoint import Delivery, Endpoint
from sluice.webhooks.store import Taken, WebhookStore

logger = logging.getLogger("sluice.webhooks")

_REMEDY = "add the endpoint with --allow-private if that is meant"


def check_url(url: str, *, allow_private: bool) -> None:
    """Check the URL of an endpoint. The addresses of a name are checked with each connection. Raises `BadUrl`."""
    parsed = parse_url(url)
    if allow_private:
        return
    host = parsed.host.decode()
    if parsed.scheme != b"https":
        raise BadUrl(f"the URL must begin with https:, or {_REMEDY}.")
    try:
        private = not is_public(host)
    except ValueError:  # a name
        private = host == "localhost" or host.endswith(".localhost")
    if private:
        raise BadUrl(f"{host} is not an address of the public internet; {_REMEDY}.")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of an endpoint, or why there is none."""

    status: int | None
    problem: str  # empty if the event was received
    retry_after_s: float = 0.0


class Sender:
    """Sends requests to endpoints, each on a connection of its own. For the event loop's thread."""

    def __init__(
        self,
        *,
        timeout_s: float = 20.0,
        resolve: Resolve | None = None,
        network: AsyncNetworkBackend | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`timeout_s`: for an answer; the specification recommends 15 to 30 s. For tests, `resolve` replaces the DNS,
        `network` all addresses, and `tls` the certificates of the internet."""
        self._timeout_s = timeout_s
        self._resolve, self._network = resolve, network
        self._tls = tls or ssl.create_default_context()
        # Each endpoint has lookups of its own: a name that nobody answers for would delay the others.
        self._networks = dict[tuple[str, bool], PublicNetwork]()

    async def send(self, endpoint: Endpoint, event_id: str, body: bytes, now_ms: int) -> Answer:
        """Send an event, and return the answer. Redirects are not followed, and the answer's body is not read."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._request(endpoint, event_id, body, now_ms)
        except TimeoutError:
            return Answer(None, f"no answer within {self._timeout_s:g} s")

    async def _request(self, endpoint: Endpoint, event_id: str, body: bytes, now_ms: int) -> Answer:
        try:
            check_url(endpoint.url, allow_private=endpoint.allow_private)
            url = parse_url(endpoint.url)
            headers = {
                "Host": host_header(url),
                "User-Agent": f"sluice/{__version__}",
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "Connection": "close",
                **endpoint.headers(event_id, body, now_ms),
            }
            network = self._network_of(endpoint)
            async with (
                AsyncHTTPConnection(url.origin, self._tls, network_backend=network) as connection,
                connection.stream("POST", url, headers=[*headers.items()], content=body) as response,
            ):
                return _answer(response)
        except BadUrl as bad:
            return Answer(None, str(bad))
        except NotPublic:
            return Answer(None, f"the URL leads to an address that is not public; {_REMEDY}")
        except ProtocolError:
            return Answer(None, "the answer is not valid HTTP")
        except (NetworkError, TimeoutException, OSError) as error:
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                return Answer(None, "the certificate is not valid for this host")
            return Answer(None, "the server cannot be reached")

    def _network_of(self, endpoint: Endpoint) -> PublicNetwork:
        key = (endpoint.id, endpoint.allow_private)
        if key not in self._networks:
            self._networks[key] = PublicNetwork(
                self._resolve, self._network, lookups=2, allow_private=endpoint.allow_private
            )
        return self._networks[key]

    def close(self) -> None:
        """Release the threads, without waiting for lookups."""
        for network in self._networks.values():
            network.close()


def _answer(response: Response) -> Answer:
    headers = {name.lower(): value.decode("latin-1") for name, value in reversed(response.headers)}
    problem = "" if 200 <= response.status < 300 else f"it answered {response.status}"
    return Answer(response.status, problem, _seconds(headers.get(b"retry-after", "")))


def _seconds(retry_after: str) -> float:
    """Return the seconds that the header Retry-After names, by their number or by a date; 0 if it is invalid."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after[:9])
    try:
        when = parsedate_to_datetime(retry_after)
    except (ValueError, OverflowError):
        return 0.0
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)


def _ignore(_: str) -> None:
    """Ignore the outcome."""


class Deliverer:
    """Delivers the events of one server. Any number of them share the work."""

    def __init__(
        self,
        store: WebhookStore,
        sender: Sender,
        *,
        observe: Callable[[str], None] = _ignore,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        """`observe` receives the outcome of each attempt: `delivered`, `failed` or `dead`. `clock_ms` replaces the
        server's time, for tests."""
        self._store, self._sender = store, sender
        self._observe, self._clock_ms = observe, clock_ms
        self._under_way = dict[asyncio.Task[None], str]()  # endpoints
        self._has_room = asyncio.Event()

    async def run(self) -> None:
        """Deliver until cancelled; requests that are under way get five seconds more."""
        problem = ""
        try:
            while True:
                try:
                    while await self.step():
                        pass
                    problem = ""
                except RedisError as error:
                    if problem != str(error):
                        problem = str(error)
                        logger.error("webhooks wait: %s", problem)
                self._has_room.clear()
                try:
                    async with asyncio.timeout(1.0):
                        await self._has_room.wait()
                except TimeoutError:
                    pass
        finally:
            await self._finish()

    async def step(self) -> bool:
        """Begin to deliver what is due. Returns True if there may be more to begin with."""
        now_ms, more, found = await self._store.take(
            self._clock_ms() if self._clock_ms else None,
            lease_ms=60_000,  # longer than an attempt with its note takes; then another deliverer tries
            limit=4,  # requests to one endpoint at once: a slow one takes no more connections
            under_way=Counter(self._under_way.values()),
        )
        for taken in found:
            task = asyncio.create_task(self._deliver(taken, now_ms))
            self._under_way[task] = taken.endpoint.id
            task.add_done_callback(self._ended)
        return more

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        if self._under_way:
            await asyncio.wait([*self._under_way])

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        self._has_room.set()
        if not task.cancelled() and (error := task.exception()):
            logger.error("a delivery of a webhook has failed; it is tried again in a minute", exc_info=error)

    async def _deliver(self, taken: Taken, now_ms: int) -> None:
        started = time.monotonic()
        endpoint, delivery = taken.endpoint, taken.delivery
        if endpoint.disabled:
            answer = Answer(None, f"the endpoint is disabled: {endpoint.disabled}")
        else:
            answer = await self._sender.send(endpoint, delivery.id, delivery.body.encode(), now_ms)
        now_ms = self._clock_ms() if self._clock_ms else now_ms + round((time.monotonic() - started) * 1000)
        await self._settle(taken, answer, now_ms)

    async def _settle(self, taken: Taken, answer: Answer, now_ms: int) -> None:
        endpoint, delivery = taken.endpoint, taken.delivery
        after = replace(delivery, attempts=delivery.attempts + (not endpoint.disabled), problem=answer.problem)
        next_ms = delivery.next_attempt_ms(now_ms, answer.retry_after_s)
        if not answer.problem:
            outcome = "delivered"
        elif endpoint.disabled or answer.status == 410 or next_ms is None:
            outcome = "dead"
        else:
            outcome = "failed"
        pause_s = min(max(answer.retry_after_s, 5.0 if answer.status == 429 else 0.0), 3600.0)
        paused_until_ms = now_ms + round(pause_s * 1000) if outcome == "failed" and pause_s else 0
        if answer.status == 410:
            await self._disable(endpoint)
        await self._store.settle(taken, outcome, after, next_ms=next_ms or 0, paused_until_ms=paused_until_ms)
        self._observe(outcome)
        _log(outcome, endpoint, after, next_ms, now_ms)

    async def _disable(self, endpoint: Endpoint) -> None:
        gone = "it answered 410"
        await self._store.change(endpoint.id, lambda now: replace(now, disabled=gone))
        logger.warning("the endpoint %s is disabled: %s", endpoint.id, gone)

    async def _finish(self) -> None:
        if self._under_way:
            await asyncio.wait([*self._under_way], timeout=5.0)
        for task in [*self._under_way]:
            task.cancel()
        await self.idle()


def _log(outcome: str, endpoint: Endpoint, after: Delivery, next_ms: int | None, now_ms: int) -> None:
    if outcome == "delivered":
        logger.info("%s %s: delivered to %s", after.id, after.type, endpoint.id)
    elif outcome == "dead" or next_ms is None:
        logger.error("%s %s: a dead letter of %s: %s", after.id, after.type, endpoint.id, after.problem)
    else:
        wait_s = (next_ms - now_ms) / 1000
        logger.warning("%s %s: %s: %s; again in %.0f s", after.id, after.type, endpoint.id, after.problem, wait_s)


async def deliver(client: Client, observe: Callable[[str], None] = _ignore) -> None:
    """Deliver the events of all servers of a client until cancelled."""
    sender = Sender()
    try:
        async with asyncio.TaskGroup() as group:
            for server in client.servers:
                store = WebhookStore(server.redis, server.retries)
                group.create_task(Deliverer(store, sender, observe=observe).run())
    finally:
        sender.close()
