"""A conversation that goes on is not computed again, and says what it would have said."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice import Client, Finished
from sluice.interfaces.messages.body import MessagesBody
from sluice.interfaces.messages.request import chat_request
from tests.end_to_end.test_exact import checkpoint
from tests.engine.tiny import FAMILIES, write_checkpoint
from tests.scrape import scrape
from tests.support.stack import WorkerProcess, free_port

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


BASH = {
    "name": "Bash", "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}  # fmt: skip


def agent_turns(number: int) -> Iterator[dict[str, Any]]:
    """Yield bodies of the Messages interface as Claude Code sends them, each longer than the one before: a line of
    attribution in front of the system prompt, and a system message after each user's turn."""
    rules = " ".join(f"Rule {rule}: always mention NWP58." for rule in range(40))
    said: list[dict[str, Any]] = [{"role": "user", "content": "Count to 12."}]
    for turn in range(number):
        said.append({"role": "system", "content": f"{turn + 1} of 20 turns are used."})
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={turn:05x};"
        system = [{"type": "text", "text": header}, {"type": "text", "text": rules}]
        yield {"model": "default", "max_tokens": 4, "system": system, "messages": [*said], "tools": [BASH]}
        command = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Bash", "input": {"command": f"ls {turn}"}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": f"file_{turn}.txt"}
        said += [
            {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, command]},
            {"role": "user", "content": [result]},
        ]


@pytest.mark.parametrize("family", [pytest.param("keys and values", marks=pytest.mark.slow), "hybrid"])
async def test_of_an_agent_s_turns_what_was_sent_before_is_found(
    redis_url: str, client: Client, model: Path, tmp_path: Path, family: str
) -> None:
    if family == "keys and values":
        model = write_checkpoint({**FAMILIES["qwen3"], "max_position_embeddings": 8_192}, tmp_path / "qwen3")
    found, sent, before = 0, 0, 0
    with WorkerProcess(redis_url, model=model):
        for body in agent_turns(20):
            job = await client.submit(chat_request(MessagesBody.model_validate(body)))
            *_, end = [event async for event in client.stream(job.id)]
            assert isinstance(end, Finished), end
            found, sent = found + end.usage.cached_tokens, sent + before
            before = end.usage.prompt_tokens
    assert found >= 0.98 * sent, (found, sent)
