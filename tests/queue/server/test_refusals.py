"""What a server's error replies mean, for the worker."""

import asyncio
import logging

import pytest

from tests.fakes import FakeChat
from tests.queue.helpers import ask, ended, settings, types, working
from tests.queue.refusing import disk_full
from tests.support.stack import Server
from tests.waiting import until


async def test_a_worker_names_a_full_disk_in_its_log_and_its_probe_and_goes_on_afterwards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "sluice.queue")
    with Server() as server:
        async with disk_full(server) as disk, working(settings(server.url, lease_s=1), FakeChat().chat) as worker:

            def is_named() -> bool:
                problem = worker.readiness.parts()["redis"]()
                return problem is not None and problem.startswith("it cannot write to its disk")

            await until(lambda: any("it cannot write to its disk" in message for message in caplog.messages))
            await until(is_named, within_s=20)
            await disk.free()
            await ask(disk.admin, "a", {"say": ["Hello"]})
            assert types(await ended(disk.admin, "a"))[-1] == "finished"
            assert worker.readiness.parts()["redis"]() is None
            await asyncio.sleep(0)
