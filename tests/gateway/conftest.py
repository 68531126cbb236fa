import logging
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.gateway import ServeSettings
from tests.fakes import FakeChat
from tests.gateway.gateways import HttpGateway, serving
from tests.queue.helpers import listening, settings, until, working
from tests.support.stack import WorkerProcess


@pytest.fixture(autouse=True)
def _nothing_fell_through(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail on errors that reached only the event loop's handler or the HTTP server's log."""
    yield
    records = [record for when in ("setup", "call") for record in caplog.get_records(when)]
    ours = [record for record in records if record.name in ("asyncio", "uvicorn.error")]
    assert [record.getMessage() for record in ours if record.levelno >= logging.ERROR] == []


@pytest.fixture
def chat() -> FakeChat:
    """The chat of `fake_worker`: a request's `say`, `pace_s` and `then` are the answer."""
    return FakeChat()


@pytest.fixture
async def fake_worker(redis_url: str, db: Redis, chat: FakeChat) -> AsyncIterator[None]:
    """A worker of the model `default` in this process, without a model, once it is known and listens."""
    known = settings(redis_url)

    async def is_known() -> bool:
        return bool(await db.exists(keys.worker(known.worker_name)))

    async with working(known, chat.chat):
        await listening(db)
        await until(is_known)
        yield


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[HttpGateway]:
    """A gateway in this process, on a free port, in its own thread and event loop."""
    with serving(redis_url, ServeSettings(_env_file=None, no_worker_s=0.5)) as gateway:
        yield gateway


@pytest.fixture
async def unforgiving(redis_url: str) -> AsyncIterator[HttpGateway]:
    """A gateway that soon cancels the jobs of a client that has left."""
    with serving(redis_url, ServeSettings(_env_file=None, disconnect_grace_s=0.2)) as gateway:
        yield gateway


@pytest.fixture
async def http(gateway: HttpGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def gateway_of_worker(worker: WorkerProcess) -> Iterator[HttpGateway]:
    with serving(worker.url, ServeSettings(_env_file=None)) as gateway:
        yield gateway


@pytest.fixture
def real_gateway(worker: WorkerProcess, redis_url: str, gateway_of_worker: HttpGateway) -> HttpGateway:
    """A gateway for the worker with the tiny model, which the tests of a file share."""
    worker.wait_ready()
    return gateway_of_worker


@pytest.fixture
async def real_http(real_gateway: HttpGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=real_gateway.url, timeout=60) as http:
        yield http
