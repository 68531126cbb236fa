"""A body names a function; the call that it asks for is made by passing it the job."""

from dataclasses import replace
from typing import Any

import pytest
from arq.worker import func

from tests.fakes import TIMINGS
from tests.queue.held import claim_of
from tests.queue.helpers import envelope
from worker.errors import JobFailure
from worker.queue.job.job import Job, JobResult
from worker.queue.job.publisher import JobLog
from worker.queue.job.runner import JobFunctions
from worker.queue.redis_server import ServerClock

ANSWER = JobResult("stop", TIMINGS, {})
CLAIM = claim_of("a")
CTX = {"context": 1}


def functions(answer: object = ANSWER) -> tuple[JobFunctions, list[tuple[Any, Any]]]:
    """Functions of which one is called, and its arguments."""
    calls: list[tuple[Any, Any]] = []

    async def chat(ctx: dict[Any, Any], request: Any) -> Any:
        calls.append((ctx, request))
        ctx["mine"] = True
        return answer

    return JobFunctions([func(chat, name="chat")], CTX), calls


def job() -> Job:
    return Job(CLAIM, JobLog(CLAIM, ServerClock(), lambda: None, lambda: None))


async def test_a_function_gets_the_request_and_a_context_of_its_own_with_the_job() -> None:
    known, calls = functions()
    body, running = envelope({"n": 1}), job()
    call = await known.open(replace(CLAIM, body_bytes=len(body)), body, 1_000)
    assert calls == [], "opening a body calls nothing"
    assert await call(running) == ANSWER
    assert calls == [({"context": 1, "job": running, "mine": True}, {"n": 1})]
    assert CTX == {"context": 1}


@pytest.mark.parametrize("max_bytes", [10, 1_000])
async def test_a_body_that_is_too_large_or_names_no_function_is_refused(max_bytes: int) -> None:
    known, calls = functions()
    body = envelope({}, function="rm")
    with pytest.raises(JobFailure) as refused:
        await known.open(replace(CLAIM, body_bytes=len(body)), body, max_bytes)
    assert refused.value.type == ("too_large" if max_bytes == 10 else "invalid_request")
    assert calls == []


async def test_a_function_that_returns_no_result_is_an_error_of_ours() -> None:
    known, _ = functions(answer={"n": 1})
    call = await known.open(CLAIM, envelope({}), 1_000)
    with pytest.raises(AssertionError, match="chat must return a JobResult"):
        await call(job())
