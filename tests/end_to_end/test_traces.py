"""Traces: from a request to its answer, over two workers and a crash, at a collector of the test's own."""

import asyncio
import itertools
import json
import signal
from contextlib import AsyncExitStack
from typing import Any

import pytest
from openai import AsyncOpenAI

from sluice import Client, Delta
from tests.end_to_end.test_cli import Command
from tests.end_to_end.test_crash import KILLED
from tests.support.collector import Seen, collecting
from tests.support.stack import GatewayProcess, WorkerProcess

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SECRET = "Count to 40. The word is xylophone."
PHASES = ["queue", "prepare", "admission", "prefill", "decode"]


def below(spans: list[Seen], parent: Seen) -> list[Seen]:
    return [span for span in spans if span.parent == parent.id]


def in_order(phases: list[Seen]) -> bool:
    """Each phase begins where the one before has ended."""
    return all(before.ended == after.began for before, after in itertools.pairwise(phases))


async def test_an_answer_over_the_gateway_two_workers_and_a_crash_is_one_trace(
    redis_url: str, client: Client, sluice: Command
) -> None:
    async with AsyncExitStack() as stack:
        collector = stack.enter_context(collecting())
        gateway = stack.enter_context(GatewayProcess(redis_url, more_env=collector.variables))
        api = await stack.enter_async_context(AsyncOpenAI(base_url=gateway.base_url, api_key="none", max_retries=0))
        with WorkerProcess(redis_url, name="first", module=KILLED, lease_s=1, more_env=collector.variables) as first:
            answer = asyncio.create_task(
                api.chat.completions.create(
                    model="default",
                    messages=[{"role": "user", "content": SECRET}],
                    max_tokens=300,  # far more than the first worker delivers
                    logit_bias={"2": -100},
                    extra_headers={"traceparent": TRACEPARENT},
                )
            )
            assert await asyncio.to_thread(first.wait) == -signal.SIGKILL
        with WorkerProcess(redis_url, name="second", lease_s=1, more_env=collector.variables):
            completion = await asyncio.wait_for(answer, 60)
            spans = await asyncio.to_thread(collector.wait_for, lambda seen: {"sluice-gateway", "sluice-worker"} <= {
                span.service for span in seen})  # fmt: skip
        code, why, _ = await asyncio.to_thread(sluice.process, "why", completion.id, "--json")
    assert {span.trace for span in spans} == {TRACE}
    request, job, *phases = spans
    assert (request.service, request.name, request.parent) == ("sluice-gateway", "POST /v1/chat/completions", PARENT)
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["sluice.requested_model"] == "default"
    assert [span for span in spans if any(name.startswith("gen_ai.") for name in span.attributes)] == [job]
    assert job.attributes["gen_ai.response.id"] == completion.id
    assert (job.name, job.parent) == ("chat default", request.id)
    assert phases == below(spans, job)
    computed = [(span.name, span.attributes["sluice.worker"]) for span in phases if span.name != "load"]
    assert computed == [(name, worker) for worker in ("first", "second") for name in PHASES]
    assert in_order(phases)
    assert request.began - 2_000_000 < job.began <= phases[0].began  # the job's submission has whole milliseconds
    assert phases[-1].ended <= job.ended <= request.ended
    assert [name for name, _ in job.events] == ["first_token", "takeover", "first_token"]
    assert [at for _, at in job.events] == sorted(at for _, at in job.events)
    assert completion.usage is not None
    assert job.attributes["gen_ai.usage.output_tokens"] == completion.usage.completion_tokens
    assert not any(span.failed for span in spans)
    text = completion.choices[0].message.content or ""
    assert b"xylophone" not in collector.bodies
    assert text
    assert text.encode() not in collector.bodies
    assert code == 0
    shown = json.loads(why)
    assert [(each["name"], each["worker"]) for each in shown["phases"]] == [
        (span.name, span.attributes["sluice.worker"]) for span in phases
    ]
    assert [round(each["began"] * 1e6) for each in shown["phases"]] == [round(span.began / 1e3) for span in phases]


@pytest.mark.slow
async def test_a_job_of_a_stopped_worker_waits_in_its_queue_again(
    redis_url: str, client: Client, sluice: Command
) -> None:
    async def why() -> dict[str, Any]:
        code, out, _ = await asyncio.to_thread(sluice.process, "why", "stopped", "--json")
        assert code == 0
        shown: dict[str, Any] = json.loads(out)
        return shown

    endless = {"logit_bias": {"2": -100}, "max_tokens": 30_000, "loop_guard": False}
    with WorkerProcess(redis_url, name="first", grace_s=0) as first:
        await client.submit({"messages": [{"role": "user", "content": SECRET}], **endless}, id="stopped")
        async for event in client.stream("stopped"):
            if isinstance(event, Delta):
                break
        first.signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait) == 0
    waiting = await why()
    assert waiting["state"] == "queued"
    assert (waiting["phases"][-1]["name"], waiting["phases"][-1]["ended"]) == ("queue", None)
    with WorkerProcess(redis_url, name="second"):
        async for event in client.stream("stopped"):
            if event.type == "resumed":
                break
        await client.cancel("stopped")
        async for _ in client.stream("stopped"):
            pass
    ended = await why()
    assert "requeue" in [moment["name"] for moment in ended["moments"]]
    bounds = [(phase["began"], phase["ended"]) for phase in ended["phases"]]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    queued = [phase for phase in ended["phases"] if phase["name"] == "queue"]
    assert [phase["attempt"] for phase in queued] == [1, 2]
    assert queued[1]["began"] == waiting["phases"][-1]["began"]
