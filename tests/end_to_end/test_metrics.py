"""What Prometheus reads of a worker is what its jobs have said of themselves."""

import asyncio
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import redis

from sluice import Cancelled, Client, Delta, Event, Failed, Finished
from tests.scrape import Page, scrape
from tests.support.chaos.harness import (
    chat_request,
    paced_worker,
    record,
    record_all,
    running,
    submit_all,
    until_decoding,
)
from tests.support.stack import ROOT, WorkerProcess, free_port

LANES = ("interactive", "batch")
HELLO = [{"role": "user", "content": "Count to 12."}]


@dataclass(frozen=True)
class Run:
    """A worker's page, and how its jobs have ended, by lane."""

    page: Page
    before_cancel: Page  # when all jobs but the cancelled one had ended
    ended: dict[str, list[Event]]

    def finished(self, lane: str) -> list[Finished]:
        return [event for event in self.ended[lane] if isinstance(event, Finished)]


@pytest.fixture(scope="module")
def run(server_url: str) -> Run:
    """Chats in both lanes; a cancelled one, and two that are refused."""
    port = free_port()
    with redis.Redis.from_url(server_url) as db:
        db.flushdb()  # other tests of this process may have left jobs in the queue
    with WorkerProcess(server_url, max_rows=4, lease_s=2, metrics_port=port):
        ended = asyncio.run(jobs(server_url))
        before_cancel = settled(port)
        ended["batch"].append(asyncio.run(cancelled(server_url)))
        return Run(settled(port), before_cancel, ended)


async def jobs(url: str) -> dict[str, list[Event]]:
    async with Client(url) as client:
        chats = [await client.submit({"messages": HELLO, "max_tokens": 4 + 3 * i}) for i in range(6)]
        refused = [
            await client.submit([{"role": "user", "content": "key " * 40_000}]),
            await client.submit([{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}]),
        ]
        offline = [await client.submit(HELLO, lane="batch") for _ in range(2)]
        return {
            "interactive": [(await record(client, job.id)).events[-1] for job in [*chats, *refused]],
            "batch": [(await record(client, job.id)).events[-1] for job in offline],
        }


async def cancelled(url: str) -> Event:
    """Cancel an answer that does not end, once some of it was delivered. Return its last event."""
    async with Client(url) as client:
        job = await client.submit(chat_request(20_000, logit_bias={"2": -100}), lane="batch")  # 2 would end it
        async for event in client.stream(job.id):
            if isinstance(event, Delta):
                await client.cancel(job.id)
    return event


def settled(port: int) -> Page:
    """A final event is out a moment before its worker has counted it, and that before the step that it is of."""
    until(port, lambda page: page("vllm:num_requests_running") == 0)
    time.sleep(0.2)
    return scrape(port)


def until(port: int, true: Callable[[Page], bool], *, within_s: float = 30) -> Page:
    deadline = time.monotonic() + within_s
    while not true(page := scrape(port)):
        assert time.monotonic() < deadline, f"not so within {within_s:g} s: {page.samples}"
        time.sleep(0.05)
    return page


def test_the_jobs_ended_as_they_were_meant_to(run: Run) -> None:
    assert len(run.finished("interactive")) == 6
    assert [type(event) for event in run.ended["interactive"][6:]] == [Failed, Failed]
    assert [type(event) for event in run.ended["batch"]] == [Finished, Finished, Cancelled]


@pytest.mark.parametrize("lane", LANES)
def test_endings_are_counted_by_their_reason(run: Run, lane: str) -> None:
    told = [event.finish_reason for event in run.finished(lane)]
    expected = {reason: told.count(reason) for reason in ("stop", "length")} | {
        "tool_calls": 0,
        "error": sum(isinstance(event, Failed) for event in run.ended[lane]),
        "abort": sum(isinstance(event, Cancelled) for event in run.ended[lane]),
    }
    counted = {reason: run.page("vllm:request_success_total", lane=lane, finished_reason=reason) for reason in expected}
    assert counted == expected


def test_a_prompt_that_can_never_fit_is_a_refused_admission(run: Run) -> None:
    assert run.page("vllm:admission_rejections_total") == 1
    assert run.page("vllm:admission_rejections_total", reason="too_large", lane="interactive") == 1
    assert run.page("sluice:request_failures_total") == 2


@pytest.mark.parametrize("lane", LANES)
def test_tokens_are_those_that_the_jobs_were_told_to_have_used(run: Run, lane: str) -> None:
    used = [event.usage for event in run.ended[lane] if isinstance(event, Finished | Cancelled)]
    assert run.page("vllm:prompt_tokens_total", lane=lane) == sum(usage.prompt_tokens for usage in used)
    assert run.page("vllm:generation_tokens_total", lane=lane) == sum(usage.completion_tokens for usage in used)
    gaps = sum(usage.completion_tokens - 1 for usage in used)
    assert run.page("vllm:inter_token_latency_seconds_count", lane=lane) == gaps
    finished = [event.usage for event in run.finished(lane)]
    for name, tokens in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
        metric = f"vllm:request_{name}_tokens"
        assert run.page(f"{metric}_sum", lane=lane) == sum(getattr(usage, tokens) for usage in finished)
        assert run.page(f"{metric}_count", lane=lane) == len(finished)


def test_times_are_those_that_the_jobs_were_told(run: Run) -> None:
    """In the lane where all that began were cut off by their limit: such a one has no step without a token."""
    finished = run.finished("interactive")
    assert {event.finish_reason for event in finished} == {"length"}
    timings = [event.timings for event in finished]
    told = {
        "time_to_first_token": sum(t.queue_s + t.ttft_s for t in timings),
        "request_prefill_time": sum(t.prefill_s for t in timings),
        "request_decode_time": sum(t.decode_s for t in timings),
        "inter_token_latency": sum(t.decode_s for t in timings),
    }
    measured = {name: run.page(f"vllm:{name}_seconds_sum", lane="interactive") for name in told}
    assert measured == pytest.approx(told, abs=0.0001)
    whole = sum(t.queue_s + t.ttft_s + t.decode_s for t in timings)
    assert whole <= run.page("vllm:e2e_request_latency_seconds_sum", lane="interactive") < whole + 10


@pytest.mark.parametrize("lane", LANES)
def test_every_claimed_job_has_waited(run: Run, lane: str) -> None:
    assert run.page("vllm:request_queue_time_seconds_count", lane=lane) == len(run.ended[lane])
    known = sum(event.timings.queue_s for event in run.finished(lane))
    assert run.page("vllm:request_queue_time_seconds_sum", lane=lane) > 0.9 * known


def test_the_engine_tells_of_its_steps(run: Run) -> None:
    page, jobs = run.before_cancel, sum(map(len, run.ended.values()))
    decoded = page("vllm:generation_tokens_total")
    drafted = page("vllm:spec_decode_num_accepted_tokens_total")
    # An end is drawn and is no token; and a row that is removed may be a step ahead.
    assert decoded - drafted <= page("sluice:step_rows_sum") <= decoded - drafted + 2 * jobs
    assert page("sluice:step_seconds_count") == page("sluice:step_rows_count") > 0


async def test_running_and_waiting_jobs_are_counted_by_all_workers_alike(redis_url: str, client: Client) -> None:
    ports = free_port(), free_port()
    rows = {"max_rows": 2, "reserved_rows": 0, "lease_s": 1}
    ids = await submit_all(client, 7, chat_request(100_000))
    offline = await submit_all(client, 3, chat_request(100_000), lane="batch", prefix="offline")
    async with running(paced_worker(redis_url, metrics_port=ports[0], **rows)):
        await until_decoding(client, ids[:2])
        async with running(paced_worker(redis_url, metrics_port=ports[1], **rows)):
            await until_decoding(client, ids[:4])
            for port in ports:
                page = await asyncio.to_thread(until, port, lambda page: page("vllm:num_requests_waiting") == 6)
                assert [page("vllm:num_requests_waiting", lane=lane) for lane in LANES] == [3, 3]
                assert [page("vllm:num_requests_running", lane=lane) for lane in LANES] == [2, 0]
            for job_id in [*ids, *offline]:
                await client.cancel(job_id)
            await record_all(client, [*ids, *offline])
            for port in ports:
                for name in ("waiting", "running"):
                    await asyncio.to_thread(until, port, lambda page, name=name: page(f"vllm:num_requests_{name}") == 0)


async def test_a_job_of_a_worker_that_died_is_a_takeover(redis_url: str, client: Client) -> None:
    port = free_port()
    first, (job_id,) = paced_worker(redis_url, lease_s=1), await submit_all(client, 1, chat_request(100))
    async with running(first):
        await until_decoding(client, [job_id])
        first.process.kill()
        async with running(paced_worker(redis_url, lease_s=1, metrics_port=port)):
            await record(client, job_id)
            page = await asyncio.to_thread(settled, port)
    assert page("sluice:takeovers_total", lane="interactive") == 1
    assert page("vllm:request_success_total", finished_reason="length") == 1
    # The prompt was read again, and of the answer only the rest was made here.
    assert page("vllm:prompt_tokens_total") == 1
    assert page("vllm:generation_tokens_total") <= 90
    assert page("vllm:request_generation_tokens_sum") == 100


def test_a_port_that_is_taken_keeps_the_worker_from_starting(redis_url: str, refusal: Callable[..., str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert refusal(redis_url, metrics_port=port).startswith(f"SLUICE_METRICS_PORT={port}: the port is in use")


def test_the_page_lists_every_metric_and_no_other(run: Run) -> None:
    of_workers, _ = (ROOT / "docs" / "settings.md").read_text().split("The HTTP gateway serves these at `/metrics`")
    rows = re.findall(r"^- `([a-z]+:\w+)`", of_workers, re.MULTILINE)
    assert sorted(rows) == sorted(family_name(name, run.page) for name in run.page.names)


def family_name(name: str, page: Page) -> str:
    """As it is asked for: a counter's samples end in `_total`."""
    return f"{name}_total" if f"{name}_total" in {sample.name for sample in page.samples} else name
