"""Turns of Codex against the gateway: a worker that answers by a script, and the one with the tiny model."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from tests.fakes import TIMINGS
from tests.gateway.gateways import HttpGateway
from tests.gateway.responses.codex import PATCH_GRAMMAR, CodexStream, message, sent_back, turn
from tests.queue.helpers import listening, settings, working
from worker.queue.job.job import Job, JobResult

Said = dict[str, Any]

PATCH_TEXT = '*** Begin Patch\n*** Add File: a.txt\n+"hi"\n*** End Patch\n'


def call(index: int, name: str, arguments: Said) -> Said:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"index": index, "id": f"call_{name}", "type": "function", "function": function}]}


class ScriptedChat:
    """Stands in for `worker.jobs.chat`: one list of deltas for each job."""

    def __init__(self, *answers: list[Said]) -> None:
        self._answers = list(answers)
        self.requests = list[Said]()

    async def chat(self, ctx: dict[Any, Any], request: Said) -> JobResult:
        job: Job = ctx["job"]
        self.requests.append(request)
        job.log.emit("started", model="default", fingerprint="fp", worker="", seed=7)
        deltas = self._answers.pop(0)
        for number, delta in enumerate(deltas):
            job.usage.completion_tokens += 1
            job.log.emit("delta", token_ids=[number], **delta)
        return JobResult("tool_calls" if "tool_calls" in deltas[-1] else "stop", TIMINGS, {})


@pytest.fixture
async def script(redis_url: str, db: Redis) -> AsyncIterator[ScriptedChat]:
    script = ScriptedChat(
        [{"reasoning": "Look first."}, call(0, "exec_command", {"cmd": "ls"})],
        [call(0, "apply_patch", {"input": PATCH_TEXT}), call(1, "mcp__docs__find", {"words": "typo"})],
        [{"content": "Do"}, {"content": "ne."}],
    )
    async with working(settings(redis_url), script.chat):
        await listening(db)
        yield script


async def answer(http: httpx.AsyncClient, body: Said) -> CodexStream:
    headers = {"accept": "text/event-stream", "originator": "codex_cli_rs", "session_id": "019a"}
    response = await http.post("/v1/responses", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return CodexStream(response.text)


async def test_a_turn_calls_functions_patches_and_tools_of_servers_until_it_is_done(
    script: ScriptedChat, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.gateway")
    first = await answer(http, turn())
    assert first.summary == "Look first."
    reasoning, command = first.items
    assert (command["name"], json.loads(command["arguments"])) == ("exec_command", {"cmd": "ls"})
    history = [*map(sent_back, first.items)]
    assert "content" not in history[0]
    history.append({"type": "function_call_output", "call_id": command["call_id"], "output": "a.txt"})

    second = await answer(http, turn(*history))
    patch, find = second.items
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH_TEXT)
    assert (find["name"], find["namespace"]) == ("find", "mcp__docs__")
    history += map(sent_back, second.items)
    found = [{"type": "input_text", "text": "page 1"}]
    history.append({"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "Success."})
    history.append({"type": "function_call_output", "call_id": find["call_id"], "output": found})

    third = await answer(http, turn(*history))
    assert third.text == "Done."
    assert third.usage is not None
    assert reasoning["encrypted_content"]
    dropped = [record.getMessage() for record in caplog.records if "hosted tools" in record.getMessage()]
    assert len(dropped) == 3
    assert all(line.endswith("without the hosted tools web_search, tool_search") for line in dropped)


async def test_the_worker_receives_the_turn_as_a_chat_completion(script: ScriptedChat, http: httpx.AsyncClient) -> None:
    first = await answer(http, turn())
    output = {"type": "function_call_output", "call_id": "call_exec_command", "output": "a.txt"}
    await answer(http, turn(*map(sent_back, first.items), output))
    request = script.requests[1]
    assert [tool["function"]["name"] for tool in request["tools"]] == ["exec_command", "apply_patch", "mcp__docs__find"]
    assert PATCH_GRAMMAR.strip() in request["tools"][1]["function"]["description"]
    assert [each["role"] for each in request["messages"]] == [
        "system", "developer", "user", "user", "assistant", "tool",
    ]  # fmt: skip
    assert request["messages"][4]["reasoning"] == "Look first."
    assert request["messages"][4]["tool_calls"][0]["function"] == {"name": "exec_command", "arguments": '{"cmd": "ls"}'}
    assert request["messages"][5] == {"role": "tool", "tool_call_id": "call_exec_command", "content": "a.txt"}
    assert (request["reasoning_effort"], request["verbosity"], request["store"]) == ("medium", "low", False)


async def test_a_whole_turn_is_accepted_by_a_worker_with_a_model(real_gateway: HttpGateway) -> None:
    said = [
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        message("assistant", "I will look."),
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "c2",
            "name": "apply_patch",
            "input": PATCH_TEXT,
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Success."},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "typo"}},
        message("user", "Count to 12."),
    ]
    body = {**turn(*said), "temperature": 0, "max_output_tokens": 60}
    async with httpx.AsyncClient(base_url=real_gateway.url, timeout=20) as http:
        response = await http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    last = json.loads(response.text.splitlines()[-2].removeprefix("data: "))
    assert last["type"] in ("response.completed", "response.incomplete")
