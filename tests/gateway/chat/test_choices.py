"""Answers of several choices that fail or are cancelled."""

import asyncio
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from sluice.cancellation import CancelOutcome
from sluice.gateway.chat import outcome_of
from tests.fakes import FakeChat
from tests.gateway.chat.test_routes import PATH, data_of, request, until_idle
from tests.queue.helpers import field
from tests.waiting import until
from worker.queue.job.job import JobResult

pytestmark = pytest.mark.usefixtures("fake_worker")


class OneFails(FakeChat):
    """The second of three choices fails once all run; the others would never end."""

    async def chat(self, ctx: dict[Any, Any], request: dict[str, Any]) -> JobResult:
        last = {"then": "hang"}
        if ctx["job"].claim.job_id.endswith(".1"):
            await until(lambda: len(self.running) == 2)
            last = {"then": "Ouch."}
        return await super().chat(ctx, {**request, **last})


@pytest.fixture
def chat() -> FakeChat:
    return OneFails()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_choice_that_fails_ends_the_answer_and_cancels_the_others(
    http: httpx.AsyncClient, chat: FakeChat, db: Redis, stream: bool
) -> None:
    async with asyncio.timeout(30):
        answer = await http.post(PATH, json=request("1", n=3, stream=stream))
    error = data_of(answer.text)[-1]["error"] if stream else answer.json()["error"]
    assert (answer.status_code, error["code"]) == (200 if stream else 500, "internal")
    await until_idle(chat)
    first = answer.headers["x-request-id"]

    async def all_have_ended() -> bool:
        states = [await field(db, job_id, "state") for job_id in (first, f"{first}.1", f"{first}.2")]
        return states == ["cancelled", "failed", "cancelled"]

    await until(all_have_ended)


@pytest.mark.parametrize(
    ("outcomes", "whole"),
    [
        (["ended", "requested", "cancelled"], "requested"),
        (["ended", "cancelled"], "cancelled"),
        (["ended", "ended"], "ended"),
    ],
)
def test_the_outcome_of_several_choices_is_that_of_the_one_that_lasts_longest(
    outcomes: list[CancelOutcome], whole: CancelOutcome
) -> None:
    assert outcome_of(outcomes) == whole
