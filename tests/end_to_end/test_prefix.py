"""A conversation that goes on is not computed again, and says what it would have said."""

from pathlib import Path
from typing import Any

import pytest

from scripts.stack import WorkerProcess, free_port
from sluice import Client, Finished
from tests.end_to_end.test_exact import checkpoint
from tests.scrape import scrape

RULES = {"role": "system", "content": "Always mention NWP58. Be kind and brief, and answer in one sentence, please."}
ASKED = ("Count to 12.", "My name is Petra.", "What is the capital of Ghana?", "What is my name?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, a hybrid, in fp32: equal whether a token was decoded or prefilled."""
    return checkpoint("tiny_chat", tmp_path_factory.mktemp("tiny"))


async def say(client: Client, messages: list[dict[str, Any]], **more: object) -> tuple[str, Finished]:
    job = await client.submit({"messages": messages, "temperature": 0, "max_tokens": 40, **more})
    events = [event async for event in client.stream(job.id)]
    result: dict[str, Any] = await client.result(job.id)
    assert isinstance(events[-1], Finished)
    return result["choices"][0]["message"]["content"], events[-1]


async def talk(client: Client, **more: object) -> tuple[list[str], list[Finished]]:
    """Each question after what was said before."""
    messages, said, ends = [RULES], list[str](), list[Finished]()
    for question in ASKED:
        messages.append({"role": "user", "content": question})
        answer, end = await say(client, messages, **more)
        messages.append({"role": "assistant", "content": answer})
        said.append(answer)
        ends.append(end)
    return said, ends


async def test_each_turn_computes_what_is_new_and_says_what_it_would_have_said(
    redis_url: str, client: Client, model: Path
) -> None:
    with WorkerProcess(redis_url, model=model, prefix_cache_gb=0):
        expected, ends = await talk(client)
        assert [end.usage.cached_tokens for end in ends] == [0, 0, 0, 0]
    port = free_port()
    with WorkerProcess(redis_url, model=model, metrics_port=port):
        said, ends = await talk(client)
        assert said == expected
        prompts, cached = zip(*((end.usage.prompt_tokens, end.usage.cached_tokens) for end in ends), strict=True)
        assert cached[0] == 0
        for before, found in zip(prompts, cached[1:], strict=False):
            assert found >= before  # the prompt of the last turn, and the answer to it
        _, elsewhere = await say(client, [RULES, {"role": "user", "content": "Repeat after me: é"}])
        assert elsewhere.usage.cached_tokens >= 20  # the rules
        page = scrape(port)
        assert page("vllm:prefix_cache_hits_total") == sum(cached) + elsewhere.usage.cached_tokens
        assert page("vllm:prefix_cache_queries_total") == sum(prompts) + elsewhere.usage.prompt_tokens - 5
        assert page("sluice:prefix_cache_bytes") > 0


async def cached_for_one_and_other(client: Client) -> tuple[int, int]:
    """Return how many tokens are found by the tenant of an earlier request, and how many by another one."""
    messages = [RULES, {"role": "user", "content": ASKED[0]}]
    await say(client, messages, tenant="one")
    _, same = await say(client, messages, user="one")
    _, other = await say(client, messages, tenant="other")
    return same.usage.cached_tokens, other.usage.cached_tokens


@pytest.mark.usefixtures("worker")
async def test_tenants_share_prefixes(client: Client) -> None:
    same, other = await cached_for_one_and_other(client)
    assert same == other > 0


async def test_tenants_can_be_kept_apart(redis_url: str, client: Client) -> None:
    with WorkerProcess(redis_url, prefix_cache_per_tenant=True):
        same, other = await cached_for_one_and_other(client)
    assert (same > 0, other) == (True, 0)
