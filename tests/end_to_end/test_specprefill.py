"""Long prompts through Redis: scored by a draft, computed in part, and said so."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis.asyncio

from models.training.data import find_code
from sluice import Cancelled, Client, Delta, Event, Failed, Finished, Progress, Started
from tests.end_to_end.test_exact import checkpoint
from tests.engine.tiny import CONFIGS, write_checkpoint
from tests.support.stack import WorkerProcess

asked, right = find_code(Random(3), 100)
LONG = [{"role": "user", "content": asked.text}]
DRAFTED = "drafted"  # the name under which one worker serves most tests
TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in fp32, its own draft in these tests."""
    return checkpoint("tiny_chat", tmp_path_factory.mktemp("tiny"))


def drafting(redis_url: str, model: Path, **settings: Any) -> WorkerProcess:
    return WorkerProcess(redis_url, model=model, specprefill_draft_model=model, **settings)


@pytest.fixture(scope="module")
def drafted(server_url: str, model: Path) -> Iterator[None]:
    """One worker for most tests. It serves under another name than the session's, and keeps a tenth by default."""
    given: dict[str, Any] = {"specprefill_threshold": 500, "specprefill_keep_pct": 0.1}
    given["module"] = "tests.end_to_end.reporting_all"
    with drafting(server_url, model, model_name=DRAFTED, step_ms=5, prefix_cache_gb=0, **given):
        yield


async def ask(
    client: Client, messages: list[dict[str, Any]] = LONG, *, served: str = DRAFTED, **more: object
) -> tuple[list[Event], Any]:
    request = {"messages": messages, "temperature": 0, "max_tokens": 30, **more}
    job = await client.submit(request, model=served)
    events = [event async for event in client.stream(job.id)]
    return events, await client.result(job.id)


def usage(events: list[Event]) -> Any:
    assert isinstance(events[-1], Finished), events[-1]
    return events[-1].usage


@pytest.mark.usefixtures("drafted")
async def test_a_thinned_prompt_gets_its_answer_and_a_receipt(client: Client, model: Path) -> None:
    events, result = await ask(client, specprefill=True, specprefill_keep_pct=0.3)
    kept, prompt = usage(events).kept_tokens, usage(events).prompt_tokens
    assert 0.3 * prompt < kept < 0.6 * prompt  # a share, and all that stays
    assert result["choices"][0]["message"]["content"] == right.text
    receipt = result["sluice"]["specprefill"]
    assert (receipt["kept"], receipt["draft"]) == (round(kept / prompt, 4), model.name)
    assert receipt["scoring_s"] > 0
    assert receipt["prefill_s"] > 0
    assert result["sluice"]["kept_tokens"] == kept
    events, _ = await ask(client, specprefill=True, specprefill_keep_pct=0.6)
    assert kept < usage(events).kept_tokens < 0.9 * prompt


@pytest.mark.usefixtures("drafted")
async def test_a_prompt_that_is_scored_is_said_to_be(client: Client) -> None:
    question, _ = find_code(Random(3), 250)  # scored in several steps
    events, _ = await ask(client, [{"role": "user", "content": question.text}], specprefill=True, max_tokens=1)
    phases = [event.phase for event in events if isinstance(event, Progress)]
    assert phases[:1] == ["scoring"]
    assert phases == sorted(phases, reverse=True)


async def receipt(client: Client, messages: list[dict[str, Any]] = LONG, **more: Any) -> Any:
    _, result = await ask(client, messages, max_tokens=4, **more)
    return result["sluice"].get("specprefill")


@pytest.mark.slow
@pytest.mark.usefixtures("drafted")
async def test_each_setting_has_its_effect(client: Client) -> None:
    result = partial(receipt, client)
    # The draft is as slow as the model here, but so little is kept that it may pay or not: either is said.
    assert set(await result()) in ({"kept", "draft", "scoring_s", "prefill_s"}, {"skipped"})
    assert await result(specprefill=False) is None
    assert await result([{"role": "user", "content": "Count to 5."}]) is None
    assert (await result(tools=[TOOL]))["skipped"].startswith("The request offers tools")
    assert (await result(response_format={"type": "json_object"}))["skipped"].startswith("The request asks for JSON")
    code = [{"role": "user", "content": f"```\n{asked.text}\n```"}]
    assert (await result(code))["skipped"].startswith("The prompt is mostly code")
    assert (await result(specprefill=True))["kept"] < 0.35  # both ends of the last turn stay, whatever is asked
    assert "kept" in await result(specprefill=True, tools=[TOOL])


@pytest.mark.slow
async def test_a_prompt_longer_than_is_scored_is_computed_whole(redis_url: str, client: Client, model: Path) -> None:
    with drafting(redis_url, model, specprefill_max_tokens=500):
        said = await receipt(client, served="default", specprefill=True)
        assert "prompts are scored up to 500" in said["skipped"]
        assert await receipt(client, served="default") is None  # shorter than the threshold


@pytest.mark.usefixtures("alive")
async def test_without_a_draft_the_wish_is_refused_by_name(client: Client) -> None:
    job = await client.submit({"messages": LONG, "specprefill": True})
    events = [event async for event in client.stream(job.id)]
    assert isinstance(events[-1], Failed)
    assert events[-1].error.type == "unsupported"
    assert events[-1].error.message.startswith("specprefill: ")


@pytest.mark.usefixtures("drafted")
async def test_a_row_that_is_cancelled_while_it_is_scored_ends_at_once(client: Client) -> None:
    endless = {"max_tokens": 20_000, "logit_bias": {"2": -100}}  # the end of the sequence cannot be drawn
    job = await client.submit({"messages": LONG, "specprefill": True, **endless}, model=DRAFTED)
    async for event in client.stream(job.id):
        if isinstance(event, Started):
            await client.cancel(job.id)
    assert isinstance(event, Cancelled)
    events, _ = await ask(client, [{"role": "user", "content": "Count to 5."}])
    assert isinstance(events[-1], Finished)


@pytest.mark.slow
async def test_a_killed_workers_thinned_answer_goes_on_with_the_same_tokens_left_out(
    redis_url: str, client: Client, db: redis.asyncio.Redis, model: Path
) -> None:
    request = {"messages": LONG, "specprefill": True, "max_tokens": 300, "temperature": 1.0, "seed": 5}
    request |= {"logit_bias": {"2": -100}}

    async def tokens(job_id: str) -> tuple[list[int], list[Event]]:
        events = [event async for event in client.stream(job_id)]
        return [token for event in events if isinstance(event, Delta) for token in event.token_ids], events

    settings = {"lease_s": 2, "prefix_cache_gb": 0}
    with drafting(redis_url, model, **settings) as first:
        expected, events = await tokens((await client.submit(request)).id)
        kept = usage(events).kept_tokens
        job = await client.submit(request)
        async for event in client.stream(job.id):
            if isinstance(event, Delta):
                first.signal(signal.SIGKILL)
                break
        with drafting(redis_url, model, **settings):
            said, events = await asyncio.wait_for(tokens(job.id), 120)
    assert said == expected
    assert any(event.type == "resumed" for event in events)
    assert (usage(events).kept_tokens, usage(events).kept_tokens is not None) == (kept, True)


@pytest.mark.slow  # as tests/engine/model/test_drafter.py, with a worker
def test_a_draft_with_other_tokens_is_refused_at_start(
    redis_url: str, model: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    other = write_checkpoint({**CONFIGS["llama"], "vocab_size": 512}, tmp_path)
    said = refusal(redis_url, model=str(model), specprefill_draft_model=str(other))
    assert "SLUICE_SPECPREFILL_DRAFT_MODEL" in said
    assert "draft has 512 tokens" in said
