import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from redis.asyncio import Redis

from tests.fakes import FakeChat
from tests.line import Line
from tests.queue.helpers import ask, settings, until, working
from tests.support.stack import free_port
from worker.monitoring.health import Health
from worker.monitoring.metrics import Metrics
from worker.monitoring.probes import answer_probes
from worker.queue.worker import QueueWorker

GIVEN = {"poll_s": 0.05, "lease_s": 1, "watchdog_s": 20}
Told = tuple[int, dict[str, str]]


def ask_port(port: int, path: str) -> Told:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


async def told(port: int, path: str = "/readyz") -> Told:
    return await asyncio.to_thread(ask_port, port, path)


def probed(worker: QueueWorker, watchdog_s: float = GIVEN["watchdog_s"]) -> Health:
    health = Health(watchdog_s)
    health.set_checks({"event loop": worker.heartbeat}, worker.readiness.parts())
    return health


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
async def line(redis_url: str) -> AsyncIterator[Line]:
    async with Line(redis_url) as line:
        yield line


async def test_a_worker_is_ready_while_its_redis_answers(line: Line, port: int) -> None:
    async with working(settings(line.url, **GIVEN), FakeChat().chat) as worker:
        with answer_probes(port, Metrics("m").registry, probed(worker)):

            async def is_ready(ready: bool) -> bool:
                return (await told(port))[0] == (200 if ready else 503)

            await until(lambda: is_ready(True))
            line.down()
            await until(lambda: is_ready(False))
            _, parts = await told(port)
            assert (parts["redis"] != "ok", parts["claims"], parts["event loop"]) == (True, "ok", "ok")
            assert (await told(port, "/healthz"))[0] == 200
            line.up()
            await until(lambda: is_ready(True))


async def test_a_worker_that_has_not_met_its_redis_is_not_ready(line: Line, port: int) -> None:
    line.down()
    async with working(settings(line.url, **GIVEN), FakeChat().chat) as worker:
        with answer_probes(port, Metrics("m").registry, probed(worker)):
            assert (await told(port))[0] == 503
            assert (await told(port, "/healthz"))[0] == 200


async def test_a_worker_that_is_told_to_stop_is_alive_and_not_ready(redis_url: str, db: Redis, port: int) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, **GIVEN), chat.chat) as worker:
        with answer_probes(port, Metrics("m").registry, probed(worker)):
            await ask(db, "a", {"then": "hang"})
            await until(lambda: bool(chat.running))
            worker.stop()
            status, parts = await told(port)
            assert (status, parts["claims"] != "ok", parts["redis"]) == (503, True, "ok")
            assert (await told(port, "/healthz"))[0] == 200


@pytest.mark.timing
async def test_probes_are_answered_while_the_event_loop_hangs(redis_url: str, port: int) -> None:
    heard: list[Told] = []

    def probe() -> None:
        time.sleep(0.9)
        heard.append(ask_port(port, "/healthz"))

    async with working(settings(redis_url, **GIVEN), FakeChat().chat) as worker:
        with answer_probes(port, Metrics("m").registry, probed(worker, watchdog_s=1.6)):
            await until(lambda: worker.heartbeat.stalled_s() > 0)
            prober = threading.Thread(target=probe)
            prober.start()
            time.sleep(1.1)
            prober.join()
            ((status, parts),) = heard
            assert (status, parts["event loop"]) == (503, "no heartbeat for 1 s")
            await asyncio.sleep(0.6)
            assert (await told(port, "/healthz"))[0] == 200
