"""A worker reads its machine's state, shows it, and gives memory back while jobs run: none is lost, and none waits for
ever."""

import asyncio
import random
from pathlib import Path

import pytest

from sluice import Client
from sluice.contract.keys import LANES
from tests.scrape import scrape
from tests.support.chaos.harness import chat_request, running
from tests.support.stack import WorkerProcess, free_port
from worker.host.courtesy import Pressure
from worker.host.linux import Linux


@pytest.mark.skipif(not Path("/proc/pressure/memory").exists(), reason="needs a kernel with PSI")
async def test_this_machine_s_own_pressure_is_read_and_shown(redis_url: str) -> None:
    port = free_port()
    with WorkerProcess(redis_url, metrics_port=port, lease_s=1) as worker:
        async with Client(redis_url) as client:
            await answer(client, (await client.submit(chat_request(4))).id)
            (fields,) = await client.workers()
        pressure = Linux().read().pressure
        assert (fields["memory_pressure"], scrape(port)("sluice:memory_pressure")) == (pressure.name.lower(), pressure)
        assert "the state of the machine cannot be read" not in worker.log()


@pytest.mark.slow
async def test_jobs_under_pressure_that_comes_a_hundred_times_answer_as_alone(redis_url: str, tmp_path: Path) -> None:
    preempting = await press(redis_url, tmp_path / "pressure", times=100)
    assert preempting >= 20


async def test_jobs_under_pressure_answer_as_alone(redis_url: str, tmp_path: Path) -> None:
    await press(redis_url, tmp_path / "pressure", times=4)


async def press(url: str, file: Path, *, times: int) -> int:
    """Press the machine this many times, while jobs of both lanes run. Returns how often that reached offline rows."""
    draw, texts = random.Random(times), [f"Count to {number}." for number in range(8, 14)]
    write(file, Pressure.NORMAL)
    worker = WorkerProcess(
        url, module="tests.end_to_end.pressed_host", more_env={"PRESSURE_FILE": str(file)}, max_rows=6, lease_s=1
    )
    async with running(worker), Client(url) as client:
        alone = {text: await answer(client, (await client.submit(chat_request(40, text))).id) for text in texts}
        asked = dict[str, str]()
        for number in range(2 * times):
            write(file, Pressure.NORMAL if number % 2 else draw.choice([Pressure.WARNING, *[Pressure.CRITICAL] * 2]))
            for _ in range(draw.randint(1, 4)):
                text = draw.choice(texts)
                asked[(await client.submit(chat_request(40, text), lane=draw.choice(LANES))).id] = text
                await asyncio.sleep(draw.uniform(0, 0.1))
        answers = await asyncio.gather(*(answer(client, id) for id in asked))
        assert dict(zip(asked, answers, strict=True)) == {id: alone[text] for id, text in asked.items()}
        return worker.log().count("memory pressure critical, gives back offline_rows")


def write(file: Path, pressure: Pressure) -> None:
    """Replace the file, so that no reader sees an empty one."""
    new = file.with_suffix(".new")
    new.write_text(str(int(pressure)), "utf-8")
    new.replace(file)


async def answer(client: Client, id: str) -> str:
    result = await client.result(id, timeout=120)
    return str(result["choices"][0]["message"]["content"])
