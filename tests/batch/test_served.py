"""Models without a worker are reported before a line for them is queued, with the remedy."""

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice import Batch, Client
from sluice.batch.run import describe_unserved, describe_unused, give_options, set_mapping
from tests.batch.helpers import Chat, holds, ids, leave, left, says, write
from tests.queue.helpers import settings, until, working


async def test_a_file_for_a_model_that_nobody_serves_may_be_refused_and_mapped_then(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("a", model="gpt-4o"), says("b", model="gpt-4o"), says("c"))
    await until(lambda: _is_served(client))
    batch = await client.batch(many, out, served_only=True)
    assert batch.errors is not None
    ((problem,), status) = batch.errors.data, batch.status
    assert (status, problem.code) == ("failed", "unserved_model")
    assert problem.message == (
        "no worker serves gpt-4o (2 lines), and there are workers for default. Start one, or send the lines to "
        "another model: --map gpt-4o=default."
    )
    assert (out.exists(), await left(db)) == (False, [])
    mapped = await client.batch(many, out, models={"gpt-4o": "default"}, served_only=True)
    assert (mapped.status, sorted(ids(out))) == ("completed", ["a", "b", "c"])


async def test_without_any_worker_a_model_may_be_right_and_its_lines_wait(
    client: Client, db: Redis, tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = write(tmp_path / "in.jsonl", says("a", model="gpt-4o"))
    told: list[str] = []

    def heard(batch: Batch) -> None:
        told.append(caplog.text)

    task = asyncio.create_task(client.batch(many, out, served_only=True, on_progress=heard))
    await until(lambda: holds(db, "sluice:queue:gpt-4o:batch", 1))
    assert "no worker is alive" in told[0], "it was said before anything was queued"
    assert "--map gpt-4o=NAME" in told[0]
    await leave(task)


async def test_a_run_that_has_begun_waits_for_its_model_whoever_left(
    client: Client, db: Redis, tmp_path: Path, out: Path, redis_url: str
) -> None:
    many = write(tmp_path / "in.jsonl", says("a", model="gpt-4o"))
    task = asyncio.create_task(client.batch(many, out))
    await until(lambda: holds(db, "sluice:queue:gpt-4o:batch", 1))
    await leave(task)
    async with working(settings(redis_url), Chat().chat):
        await until(lambda: _is_served(client))
        task = asyncio.create_task(client.batch(many, out, served_only=True))
        await asyncio.sleep(0.3)
        assert not task.done()
        await leave(task)


@pytest.mark.parametrize(
    "foreign",
    [("SET", "sluice:worker:x", "1"), ("SET", b"sluice:worker:\xff", "1"), ("HSET", b"sluice:worker:\xff", "a", "b")],
)
async def test_a_run_goes_on_beside_a_foreign_value_among_the_workers(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path, foreign: tuple[str | bytes, ...]
) -> None:
    await db.execute_command(*foreign)
    batch = await client.batch(write(tmp_path / "in.jsonl", says("a")), out, models={"*": "default"})
    assert (batch.status, ids(out)) == ("completed", ["a"])


async def _is_served(client: Client) -> bool:
    return bool(await client.workers())


@pytest.mark.parametrize(
    ("served", "maps"),
    [([], "--map a=NAME --map b=NAME"), (["x"], "--map a=x --map b=x"), (["x", "y"], "--map a=NAME --map b=NAME")],
)
def test_each_model_that_nobody_serves_is_named_with_its_option(served: list[str], maps: str) -> None:
    said = describe_unserved({"b": 1, "a": 2_000, "x": 3}, {*served, "x"} if served else (), {}, give_options)
    assert said is not None
    assert maps in said
    assert "a (2,000 lines), b (1 line)" in said
    assert describe_unserved({"x": 3}, {"x"}, {}, give_options) is None


@pytest.mark.parametrize(
    ("mapped", "options"),
    [
        ({"gpt": "typo"}, "--map gpt=x"),
        ({"gpt": "typo", "old": "typo", "new": "x"}, "--map gpt=x --map old=x"),
        ({"*": "typo"}, "--model x"),
        ({}, "--map typo=x"),
    ],
)
def test_a_mapping_to_a_model_that_nobody_serves_is_advised_to_be_another_mapping(
    mapped: dict[str, str], options: str
) -> None:
    said = describe_unserved({"typo": 2}, {"x"}, mapped, give_options)
    assert said is not None
    assert said.endswith(f"send the lines to another model: {options}")


@pytest.mark.parametrize(
    ("mapped", "pairs"), [({"gpt": "typo", "old": "typo"}, "gpt=x,old=x"), ({"*": "typo"}, "*=x"), ({}, "typo=x")]
)
def test_the_advice_for_a_folder_names_the_setting(mapped: dict[str, str], pairs: str) -> None:
    advice = describe_unserved({"typo": 2}, {"x"}, mapped, set_mapping)
    assert advice is not None
    assert f"set {pairs} in the workers' SLUICE_BATCH_MODELS" in advice


async def test_the_advice_for_a_mapping_to_a_model_that_nobody_serves_works_and_nothing_is_left_by_what_was_refused(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("a", model="gpt-4o"))
    await until(lambda: _is_served(client))
    batch = await client.batch(many, out, models={"gpt-4o": "typo"}, served_only=True)
    assert batch.errors is not None
    assert batch.errors.data[0].message.endswith("--map gpt-4o=default.")
    assert (list(tmp_path.iterdir()), await client.batches(), await left(db)) == ([many], [], [])
    assert (await client.batch(many, out, models={"gpt-4o": "default"}, served_only=True)).status == "completed"


async def test_a_mapped_name_that_no_line_has_is_reported(
    client: Client, chat: Chat, tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = write(tmp_path / "in.jsonl", says("a", model="gpt-4o"), says("b"))
    await until(lambda: _is_served(client))
    await client.batch(many, out, models={"gpt-4o": "default", "gpt-40": "default", "*": "default"})
    said = [record.getMessage() for record in caplog.records if record.name == "sluice.batch"]
    assert said == ["--map gpt-40=default: no line of the file names this model"]
    assert describe_unused({"gpt-4o": "default", "*": "x"}, {"gpt-4o"}) is None


async def test_a_name_that_ends_in_a_star_maps_the_lines_that_begin_with_it(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("a", model="gpt-4o-mini"), says("b", model="gpt-5"), says("c"))
    await until(lambda: _is_served(client))
    batch = await client.batch(many, out, models={"gpt-*": "gone", "gpt-4*": "default"}, served_only=True)
    assert batch.errors is not None
    assert "--map gpt-*=default" in batch.errors.data[0].message
    batch = await client.batch(many, out, models={"gpt-*": "default"}, served_only=True)
    assert (batch.status, batch.sluice.models) == ("completed", {"default": 3})
