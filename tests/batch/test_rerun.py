"""The same command on another file, with other models, or on the files of another run."""

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice import BatchRefused, Client
from tests.batch.helpers import ANY, Chat, holds, leave, left, read, says, write
from tests.queue.helpers import settings, until, working


@pytest.mark.parametrize("wish", ["another input", "a changed input", "other models", "a missing input"])
async def test_the_files_of_a_run_that_has_ended_are_not_another_s(
    client: Client, chat: Chat, tmp_path: Path, out: Path, wish: str
) -> None:
    many, models = write(tmp_path / "in.jsonl", says("a")), ANY
    first = await client.batch(many, out, models=ANY)
    before = out.read_bytes(), len(chat.began)
    match wish:
        case "another input":
            many = write(tmp_path / "other.jsonl", says("b"))
        case "a changed input":
            write(many, says("a"), says("b"))
        case "other models":
            models = {"*": "other"}
        case "a missing input":
            many.unlink()
    with pytest.raises(BatchRefused) as refused:
        await client.batch(many, out, models=models)
    assert wish == "a missing input" or f"name another output, or remove {out}, {out}.run" in str(refused.value)
    assert (out.read_bytes(), len(chat.began)) == before
    assert await client.batches() == [first]
    out.unlink()
    out.with_name("out.jsonl.run").unlink()
    if wish in ("another input", "a changed input"):
        assert (await client.batch(many, out, models=ANY)).status == "completed", "that was the way out"


@pytest.mark.parametrize("other", ["models", "input"])
async def test_a_run_that_has_done_nothing_is_begun_anew(
    client: Client, db: Redis, tmp_path: Path, out: Path, redis_url: str, other: str
) -> None:
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}", model="gpt-4o-mini") for k in range(20)))
    task = asyncio.create_task(client.batch(many, out))
    queue = "sluice:queue:gpt-4o-mini:batch"
    await until(lambda: holds(db, queue, 20))
    await leave(task)
    (first,) = await client.batches()
    if other == "input":
        write(many, says("b"))
    chat = Chat()
    async with working(settings(redis_url, reserved_rows=0), chat.chat):
        batch = await client.batch(many, out, models=ANY)
        assert (batch.status, batch.id == first.id) == ("completed", False)
    assert len(read(out)) == (20 if other == "models" else 1)
    assert await left(db) == []
    replaced = await client.batch_status(first.id)
    assert replaced.errors is not None
    assert (replaced.status, [problem.code for problem in replaced.errors.data]) == ("failed", ["replaced"])
