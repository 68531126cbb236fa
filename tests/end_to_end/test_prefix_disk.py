"""A prefix on disk survives the worker that computed it."""

import base64
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sluice import Client, Delta, Finished, Progress, Resumed
from tests.support.stack import WorkerProcess

LONG = " ".join(f"Line {number} says {number * 7 % 100}." for number in range(120))


def serving(redis_url: str, folder: Path, **settings: Any) -> WorkerProcess:
    return WorkerProcess(redis_url, prefix_disk_dir=folder, **settings)


async def ask(client: Client, *more: dict[str, str]) -> tuple[Any, str]:
    """Return usage and answer."""
    messages = [{"role": "user", "content": LONG}, *more]
    job = await client.submit({"messages": messages, "temperature": 0, "max_tokens": 12})
    events = [event async for event in client.stream(job.id)]
    assert isinstance(events[-1], Finished), events[-1]
    return events[-1].usage, text_of(events)


async def test_a_conversation_goes_on_from_disk_after_a_restart(redis_url: str, client: Client, tmp_path: Path) -> None:
    with serving(redis_url, tmp_path) as worker:
        _, first = await ask(client)
        worker.signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    turn = {"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}
    with serving(redis_url, tmp_path):
        usage, from_disk = await ask(client, *turn)
    with WorkerProcess(redis_url):
        _, computed = await ask(client, *turn)
    assert usage.cached_tokens > 1000
    assert from_disk == computed


def test_a_folder_that_cannot_be_written_is_refused_at_start(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    worker = serving(redis_url, tmp_path / "file" / "folder")
    code = worker.start(wait=False).wait(60)
    assert code == 2
    assert "SLUICE_PREFIX_DISK_DIR" in worker.log()


@pytest.mark.slow
async def test_a_prefix_that_is_read_from_disk_is_reported_as_loading(
    redis_url: str, client: Client, tmp_path: Path
) -> None:
    with serving(redis_url, tmp_path) as worker:
        await ask(client)
        worker.signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    with serving(redis_url, tmp_path, module="tests.end_to_end.slow_prefix_reads"):
        job = await client.submit({"messages": [{"role": "user", "content": LONG}], "max_tokens": 12})
        events = [event async for event in client.stream(job.id)]
    loading = [event for event in events if isinstance(event, Progress) and event.phase == "loading"]
    assert loading
    assert all(0 <= event.done <= event.total for event in loading)
    last = events[-1]
    assert isinstance(last, Finished)
    assert loading[-1].total >= last.usage.cached_tokens > 1000


@pytest.mark.slow
async def test_a_worker_that_takes_over_a_job_finds_its_prefix_in_the_folder(
    redis_url: str, client: Client, tmp_path: Path
) -> None:
    turn = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Count to 40."}
    with serving(redis_url, tmp_path, lease_s=1) as dead:
        for _ in range(3):  # the third use writes it
            await ask(client)
        until, written = time.monotonic() + 20, set[Path]()
        while not written or written != {*tmp_path.iterdir()}:  # all parts, on a busy machine too
            assert time.monotonic() < until
            written = {*tmp_path.iterdir()} if list(tmp_path.glob("*.safetensors")) else set()
            time.sleep(1)
        request = {
            "messages": [{"role": "user", "content": LONG}, *turn],
            "temperature": 0,
            "max_tokens": 300,
            "logit_bias": {"0": -100, "2": -100},
        }
        job = await client.submit(request)
        async for event in client.stream(job.id):
            if isinstance(event, Delta):
                dead.signal(signal.SIGKILL)
                break
        # A busy machine gives up a read that takes longer than computing it should; this worker waits for each.
        with serving(redis_url, tmp_path, lease_s=1, module="tests.end_to_end.slow_prefix_reads"):
            resumed = [event async for event in client.stream(job.id)]
            whole = await client.submit(request)
            uninterrupted = [event async for event in client.stream(whole.id)]
    last = resumed[-1]
    assert isinstance(last, Finished)
    assert last.usage.cached_tokens > 1000
    assert any(isinstance(event, Resumed) for event in resumed)
    assert text_of(resumed) == text_of(uninterrupted)


def text_of(events: Sequence[Any]) -> str:
    return "".join(event.content or "" for event in events if isinstance(event, Delta))


KEY = base64.b64encode(bytes(range(32))).decode()


@pytest.mark.slow
async def test_encrypted_prefixes_survive_a_restart_and_are_not_found_without_the_key(
    redis_url: str, client: Client, tmp_path: Path
) -> None:
    with serving(redis_url, tmp_path, prefix_disk_key=KEY) as worker:
        _, first = await ask(client)
        worker.signal(signal.SIGTERM)
        assert worker.wait(60) == 0
        assert KEY not in worker.log()
    with serving(redis_url, tmp_path, prefix_disk_key=KEY):
        usage, again = await ask(client)
    assert usage.cached_tokens > 1000
    assert again == first
    with serving(redis_url, tmp_path):
        usage, again = await ask(client)
    assert usage.cached_tokens == 0
    assert again == first


@pytest.mark.slow
def test_a_bad_key_is_refused_without_being_shown(redis_url: str, tmp_path: Path) -> None:
    worker = serving(redis_url, tmp_path, prefix_disk_key="kumquat")
    assert worker.start(wait=False).wait(60) == 2
    assert "SLUICE_PREFIX_DISK_KEY=***: it must be 32 bytes in base64" in worker.log()
    assert "kumquat" not in worker.log()
