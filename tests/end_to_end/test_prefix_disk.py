"""A prefix on disk survives the worker that computed it."""

import signal
from pathlib import Path
from typing import Any

from scripts.stack import WorkerProcess
from sluice import Client, Finished

LONG = " ".join(f"Line {number} says {number * 7 % 100}." for number in range(120))


def serving(redis_url: str, folder: Path, **settings: Any) -> WorkerProcess:
    return WorkerProcess(redis_url, prefix_disk_dir=folder, **settings)


async def ask(client: Client, *more: dict[str, str]) -> tuple[Any, str]:
    """Return usage and answer."""
    messages = [{"role": "user", "content": LONG}, *more]
    job = await client.submit({"messages": messages, "temperature": 0, "max_tokens": 12})
    events = [event async for event in client.stream(job.id)]
    assert isinstance(events[-1], Finished), events[-1]
    answer = "".join(getattr(event, "content", None) or "" for event in events)
    return events[-1].usage, answer


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
