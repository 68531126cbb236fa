"""Requests without a limit, through Redis, on a worker whose memory holds two of their rows at their end."""

import asyncio
import time
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step

from sluice import Client, Delta, Finished
from sluice.contract.phases import JobPhases
from tests.engine.test_memory import WIDE, built
from tests.engine.tiny import write_checkpoint
from tests.support.stack import WorkerProcess

ROWS, CONTEXT = 4, 2_048  # tokens of a context; a row without a limit first gets memory for 1,024 of its answer
NO_END = {"logit_bias": {"2": -100}, "loop_guard": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint({**WIDE, "max_position_embeddings": 16 * CONTEXT}, tmp_path_factory.mktemp("wide"))


def worker_of(redis_url: str, folder: Path, rows_at_end: float = 2, **settings: object) -> WorkerProcess:
    costs = built().costs
    beyond = costs.peak_bytes([[CONTEXT] * 2]) - costs.peak_bytes([[CONTEXT]])
    memory = costs.peak_bytes([[CONTEXT]]) + (rows_at_end - 1) * beyond
    given = {"context_tokens": CONTEXT, "speculation": "off", "prefix_cache_gb": 0, **settings}
    return WorkerProcess(redis_url, model=folder, memory_gb=1 + memory / 1e9, memory_headroom_gb=1, **given)


def messages(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Count to {i + 3}."}]


@cache
def alone(folder: Path, i: int) -> list[int]:
    network, tokenizer = mlx_lm.load(str(folder))
    prompt = tokenizer.apply_chat_template(messages(i), add_generation_prompt=True)

    def never_ends(_: Any, logits: Any) -> Any:
        return logits.at[..., 2].add(-100)

    room = CONTEXT - len(prompt)
    steps = generate_step(mx.array(prompt), network, max_tokens=room, logits_processors=[never_ends])
    return [int(token) for token, _ in steps]


async def follow(client: Client, job_id: str) -> tuple[list[int], str, float]:
    """Return a job's tokens, how it has ended, and when."""
    tokens, ending = list[int](), ""
    async for event in client.stream(job_id):
        match event:
            case Delta(token_ids=drawn):
                tokens += drawn
            case Finished(finish_reason=ending):
                pass
    return tokens, ending, time.monotonic()


@pytest.mark.slow
async def test_rows_preempt_each_other_and_all_end_as_alone_the_oldest_first(
    redis_url: str, client: Client, folder: Path
) -> None:
    with worker_of(redis_url, folder) as worker:
        request = {"temperature": 0, **NO_END}
        jobs = [await client.submit({"messages": messages(0), **request})]
        async for event in client.stream(jobs[0].id):
            if isinstance(event, Delta):  # from then on it is older than the others
                break
        jobs += [await client.submit({"messages": messages(i), **request}) for i in range(1, ROWS)]
        answers = await asyncio.wait_for(asyncio.gather(*(follow(client, job.id) for job in jobs)), 300)
        log = worker.log()
        records = [JobPhases.read(await client.redis.hget(f"sluice:job:{job.id}", "phases")) for job in jobs]  # type: ignore[misc]
    assert log.count(": preempted") > 0
    names = [[moment.name for moment in record.moments()] for record in records]
    assert sum(each.count("preempt") for each in names) == log.count(": preempted")
    assert all(each.count("preempt") == each.count("resume") for each in names)
    assert names[0] == ["first_token"]
    for i, (tokens, ending, _) in enumerate(answers):
        assert (ending, tokens) == ("length", alone(folder, i)), f"row {i}"
    times = [at for *_, at in answers]
    assert times[0] == min(times), "the oldest first"


@pytest.mark.slow
async def test_killed_workers_rows_go_on_as_alone_on_a_worker_that_cannot_start_them_all(
    redis_url: str, client: Client, folder: Path
) -> None:
    request = {"temperature": 0, **NO_END}
    with worker_of(redis_url, folder, lease_s=1) as first:
        jobs = [await client.submit({"messages": messages(0), **request})]
        async for event in client.stream(jobs[0].id):
            if isinstance(event, Delta):  # from then on it is older than the others
                break
        jobs += [await client.submit({"messages": messages(i), **request}) for i in range(1, ROWS)]
        streams = [asyncio.create_task(follow(client, job.id)) for job in jobs]
        await until_delivered(client, jobs[0].id, 1_300)
        first.kill()
        with worker_of(redis_url, folder, rows_at_end=1.5, lease_s=1):
            answers = await asyncio.wait_for(asyncio.gather(*streams), 300)
    assert [tokens for tokens, *_ in answers] == [alone(folder, i) for i in range(ROWS)]


async def until_delivered(client: Client, job_id: str, tokens: int) -> None:
    seen = 0
    async for event in client.stream(job_id):
        seen += len(event.token_ids) if isinstance(event, Delta) else 0
        if seen >= tokens:
            return


@pytest.mark.slow  # tests/engine/test_growth.py has it without a worker
async def test_row_that_outgrows_memory_alone_ends_with_length_and_a_warning(
    redis_url: str, client: Client, folder: Path
) -> None:
    with worker_of(redis_url, folder, rows_at_end=0.3, context_tokens=16 * CONTEXT) as worker:
        job = await client.submit({"messages": messages(0), "temperature": 0, **NO_END})
        result = await asyncio.wait_for(client.result(job.id), 120)
        log = worker.log()
    assert result["choices"][0]["finish_reason"] == "length"
    assert result["usage"]["total_tokens"] < 4 * CONTEXT
    assert [warning.split(":")[0] for warning in result["sluice"]["warnings"]] == ["max_tokens"]
    assert "memory holds no longer row" in log


async def test_default_of_the_worker_is_kept_if_it_has_one(redis_url: str, client: Client, folder: Path) -> None:
    with worker_of(redis_url, folder, default_max_tokens=20):
        job = await client.submit({"messages": messages(0), "temperature": 0, **NO_END})
        result = await asyncio.wait_for(client.result(job.id), 120)
    assert result["usage"]["completion_tokens"] == 20
