"""Two gateways and two feeders on one folder at once."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from sluice.batch.folder import run_paths
from sluice.gateway import ServeSettings
from tests.gateway.batches.test_runs import created, ended, uploaded
from tests.gateway.gateways import serving
from tests.queue.helpers import until
from worker.environment import child_environment


async def feeding(redis_url: str, folder: Path) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "sluice.cli", "batch", "feed", str(folder), "--until-eof", "--take"]
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, env=child_environment(redis_url, None))


@pytest.mark.slow
@pytest.mark.usefixtures("fake_worker")
async def test_each_line_is_answered_once_although_a_feeder_is_killed(
    openai: AsyncOpenAI, redis_url: str, folder: Path
) -> None:
    lines, few = [f"r{k}" for k in range(600)], [f"r{k}" for k in range(50)]
    async with AsyncExitStack() as stack:
        second = stack.enter_context(serving(redis_url, ServeSettings(_env_file=None, batch_dir=folder)))
        other = await stack.enter_async_context(AsyncOpenAI(base_url=second.base_url, api_key="none", max_retries=0))
        file_id = await uploaded(openai, *lines)
        runs = [(await created(other, file_id)).id for _ in "ab"]
        killed = await feeding(redis_url, folder)
        outputs = [folder / "running" / run / "output.jsonl" for run in runs]
        await until(lambda: all(path.exists() and path.stat().st_size > 0 for path in outputs))
        short_id = await uploaded(other, *few)
        runs += [(await created(openai, short_id)).id for _ in "cd"]
        feeder = await feeding(redis_url, folder)
        assert feeder.stdin is not None
        await until(lambda: all(run_paths(folder / "running" / run).state.exists() for run in runs[2:]))
        killed.kill()
        await killed.wait()
        assert [path.exists() for path in outputs] == [True, True], "both were running"
        feeder.stdin.write(b"take\n")
        for run_id in runs:
            run = await ended(other, run_id)
            assert run.status == "completed"
            answers = (await openai.files.content(run.output_file_id or "")).text.splitlines()
            wanted = lines if run.input_file_id == file_id else few
            assert sorted(json.loads(answer)["custom_id"] for answer in answers) == sorted(wanted)
        for client in (openai, other):
            assert {run.id for run in (await client.batches.list()).data} == {*runs}
        feeder.stdin.close()
        assert await feeder.wait() == 0
