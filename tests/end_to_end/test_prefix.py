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


async def talk(client: Client, *, tenant: str) -> tuple[list[str], list[Finished]]:
    """Ask each question after what was said before. `tenant` may differ by {turn}."""
    messages, said, ends = [RULES], list[str](), list[Finished]()
    for turn, question in enumerate(ASKED):
        messages.append({"role": "user", "content": question})
        answer, end = await say(client, messages, tenant=tenant.format(turn=turn))
        messages.append({"role": "assistant", "content": answer})
        said.append(answer)
        ends.append(end)
    return said, ends


async def test_each_turn_computes_what_is_new_and_says_what_it_would_have_said(
    redis_url: str, client: Client, model: Path
) -> None:
    """Here tenants are kept apart, so a turn by another tenant computes all of it."""
    port = free_port()
    with WorkerProcess(redis_url, model=model, metrics_port=port, prefix_cache_per_tenant=True):
        ended = [await talk(client, tenant="one"), await talk(client, tenant="{turn}")]
        (said, ends), (expected, computed) = ended
        assert said == expected
        prompts, cached = zip(*((end.usage.prompt_tokens, end.usage.cached_tokens) for end in ends), strict=True)
        assert cached[0] == 0
        for before, found in zip(prompts, cached[1:], strict=False):
            assert found >= before  # the prompt of the last turn, and the answer to it
        assert [end.usage.cached_tokens for end in computed] == [0, 0, 0, 0]
        _, elsewhere = await say(client, [RULES, {"role": "user", "content": "Repeat after me: é"}], user="one")
        assert elsewhere.usage.cached_tokens >= 20  # the rules
        page = scrape(port)
        assert page("vllm:prefix_cache_hits_total") == sum(cached) + elsewhere.usage.cached_tokens
        assert page("vllm:prefix_cache_queries_total") == 2 * sum(prompts) + elsewhere.usage.prompt_tokens - 9
        assert page("sluice:prefix_cache_bytes") > 0


@pytest.mark.usefixtures("worker")
async def test_tenants_share_prefixes_by_default(client: Client) -> None:
    messages = [RULES, {"role": "user", "content": ASKED[0]}]
    await say(client, messages, tenant="one")
    _, same = await say(client, messages, user="one")
    _, other = await say(client, messages, tenant="other")
    assert same.usage.cached_tokens == other.usage.cached_tokens > 0
