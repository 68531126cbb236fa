"""Predictions and speculation, which the gateway leaves to the worker, and the counts that come back."""

from typing import Any

import httpx
import pytest

from tests.fakes import FakeChat
from tests.gateway.chat.test_routes import PATH, data_of, request
from worker.queue.job.job import JobResult

ASKED: dict[str, Any] = {
    "prediction": {"type": "content", "content": "1 2 3 4"},
    "speculation": {"max_tokens": 3},
}
COUNTS = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}


class Predicting(FakeChat):
    """Counts a draft in the usage of each job, and notes the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[dict[str, Any]] = []

    async def chat(self, ctx: dict[Any, Any], request: dict[str, Any]) -> JobResult:
        self.requests.append(request)
        usage = ctx["job"].usage
        usage.accepted_prediction_tokens = COUNTS["accepted_prediction_tokens"]
        usage.rejected_prediction_tokens = COUNTS["rejected_prediction_tokens"]
        done = await super().chat(ctx, request)
        tokens = {"prompt_tokens": 0, "completion_tokens": usage.completion_tokens}
        done.result["usage"] = {**tokens, "completion_tokens_details": COUNTS}
        done.result["choices"] = [{"index": 0, "finish_reason": "stop"}]
        return done


@pytest.fixture
def chat() -> FakeChat:
    return Predicting()


async def usage_of(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """Return the usage of an answer, whole or streamed."""
    answer = await http.post(PATH, json={**body, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200, answer.text
    made = data_of(answer.text)[-2] if body["stream"] else answer.json()
    return dict(made["usage"])


@pytest.mark.usefixtures("fake_worker")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_each_choice_has_the_prediction_and_its_counts_are_added(
    http: httpx.AsyncClient, chat: Predicting, n: int, stream: bool
) -> None:
    usage = await usage_of(http, **request("1", " 2"), **ASKED, n=n, stream=stream)
    assert [{name: each.get(name) for name in ASKED} for each in chat.requests] == [ASKED] * n
    assert usage["completion_tokens"] == 2 * n
    assert usage["completion_tokens_details"] == {name: count * n for name, count in COUNTS.items()}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_worker_counts_the_tokens_of_a_prediction(real_http: httpx.AsyncClient, n: int, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Count to 4."}], "temperature": 0}
    details = (await usage_of(real_http, **body, **ASKED, n=n, stream=stream))["completion_tokens_details"]
    assert details.keys() == COUNTS.keys() | {"reasoning_tokens"}
    assert min(details.values()) >= 0
