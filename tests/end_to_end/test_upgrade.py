"""Rolling upgrades: the last released client and worker beside today's, in both directions, under load."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from sluice import Client, Event
from tests.end_to_end.test_shutdown import HANGS_S, ended, endless, rest, stop, until_decoding
from tests.support.chaos.harness import running
from tests.support.stack import ROOT, TINY_CHAT, WorkerProcess

# The last release of the contract; a later one takes its place here.
RELEASED = "71df04a4ac36bdd7b7a87a6d2217aaac12ba9c7c"
TOKENS = 800  # about a second with eight rows: the first worker is stopped meanwhile

# A producer of the release: it queues a request under each id, and prints the text and the attempts of each stream.
PRODUCER = """
import asyncio, json, sys
from sluice import Client, Delta

async def text_of(client, request, id):
    await client.submit(request, id=id)
    events = [event async for event in client.stream(id)]
    text = "".join(event.content or "" for event in events if isinstance(event, Delta))
    return {"text": text, "types": [event.type for event in events], "attempts": [event.attempt for event in events]}

async def main():
    url, request, *ids = sys.argv[1:]
    async with Client(url) as client:
        print(json.dumps(await asyncio.gather(*(text_of(client, json.loads(request), id) for id in ids))))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the release."""
    if not shutil.which("git") or subprocess.run(["git", "-C", ROOT, "cat-file", "-e", RELEASED]).returncode:
        pytest.skip("this checkout lacks the history with the last release")
    archive = subprocess.run(["git", "-C", ROOT, "archive", RELEASED], check=True, stdout=subprocess.PIPE).stdout
    folder = tmp_path_factory.mktemp("released")
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    for package in ("worker", "sluice"):
        command = [sys.executable, "-c", f"import {package}; print({package}.__file__)"]
        where = subprocess.run(command, check=True, cwd=folder, env=environment(folder), stdout=subprocess.PIPE).stdout
        assert Path(where.decode().strip()).is_relative_to(folder)
    return folder


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root)}


async def produce(root: Path, url: str, ids: list[str]) -> asyncio.subprocess.Process:
    """Start a producer with the code of this checkout."""
    request = json.dumps(endless(TOKENS))
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PRODUCER, url, request, *ids, cwd=root, env=environment(root), stdout=subprocess.PIPE
    )


def told(events: list[Event]) -> dict[str, Any]:
    """Return what a producer prints of a stream."""
    text = "".join(getattr(event, "content", None) or "" for event in events if event.type == "delta")
    return {"text": text, "types": [event.type for event in events], "attempts": [event.attempt for event in events]}


@pytest.mark.slow
@pytest.mark.parametrize("grace_s", [HANGS_S, 0], ids=["rows end", "rows are requeued"])
@pytest.mark.parametrize("upgrade", [True, False], ids=["upgrade", "downgrade"])
async def test_a_worker_of_another_release_takes_over_and_no_stream_is_lost_or_begins_again(
    redis_url: str, client: Client, released: Path, upgrade: bool, grace_s: float
) -> None:
    before, after = (released, ROOT) if upgrade else (ROOT, released)
    own, foreign = ([f"{who}-{number}" for number in range(4)] for who in ("own", "foreign"))
    first = WorkerProcess(redis_url, root=before, model=TINY_CHAT, grace_s=grace_s)
    async with running(first), running(WorkerProcess(redis_url, root=after, model=TINY_CHAT)):
        producer = await produce(released, redis_url, foreign)
        for job_id in own:
            await client.submit(endless(TOKENS), id=job_id)
        streams = [asyncio.create_task(rest(client, job_id)) for job_id in own]
        await asyncio.gather(*(until_decoding(client, job_id) for job_id in [*own, *foreign]))
        await stop(first)
        later = await client.submit(endless(TOKENS))
        assert await ended(first) == 0
        results = [told(await stream) for stream in streams]
        output, _ = await asyncio.wait_for(producer.communicate(), HANGS_S)
        results += json.loads(output)
        alone = told(await rest(client, later.id))["text"]
    attempts = {max(result["attempts"]) for result in results}
    assert [result["text"] for result in results] == [alone] * 8
    assert {result["types"][-1] for result in results} == {"finished"}
    assert not any("restarted" in result["types"] for result in results)
    assert attempts == ({1} if grace_s else {1, 2})  # jobs of the second worker have their first
