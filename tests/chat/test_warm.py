"""Prompts that are computed before a job needs them. Through a worker: `tests/end_to_end/test_prefix_warm.py`."""

import json
import logging
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import ByteTokenizer, FakeEngine, worker_context
from worker.chat.context import WorkerContext
from worker.chat.warm import BadWarmFile, Warmed, read_conversations, warm_and_log, warm_prompts
from worker.outcomes import NotStored, StoreResult
from worker.request import GenerationRequest
from worker.settings import Settings

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello there"}
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}[assistant]"


def written(folder: Path, content: Any) -> Path:
    file = folder / "warm.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ([SYSTEM, USER], [[SYSTEM, USER]]),
        ([[SYSTEM, USER], [USER]], [[SYSTEM, USER], [USER]]),
        (["Be brief."], [[SYSTEM]]),
        ({"messages": [USER], "tenant": "acme"}, [[USER]]),
        ([{"messages": [USER]}, "Be brief."], [[USER], [SYSTEM]]),
    ],
)
def test_a_file_holds_messages_conversations_texts_or_requests(tmp_path: Path, content: Any, messages: Any) -> None:
    assert [body["messages"] for body in read_conversations(written(tmp_path, content))] == messages


def test_the_other_fields_of_a_request_are_kept(tmp_path: Path) -> None:
    (body,) = read_conversations(written(tmp_path, {"messages": [USER], "tenant": "acme"}))
    assert body["tenant"] == "acme"


@pytest.mark.parametrize("content", ["{", "[]", '""', "7", "[7]", '[{"tools": []}]', "[" * 100_000])
def test_a_file_without_conversations_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadWarmFile):
        read_conversations(written(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadWarmFile, match="No such file"):
        read_conversations(tmp_path / "none")


def one_token(request: GenerationRequest) -> Iterable[int]:
    return [65]


@pytest.fixture
async def context() -> AsyncIterator[WorkerContext]:
    settings = Settings(model="none", prefix_cache_per_tenant=True)
    async with FakeEngine(one_token) as engine:
        yield worker_context(settings, engine, ByteTokenizer(template=TEMPLATE))


class Stored:
    """Collects what is stored, as text, by namespace."""

    def __init__(self, missing: NotStored | None = None) -> None:
        """`missing`: why nothing can be stored."""
        self.texts: list[tuple[str, str]] = []
        self._missing = missing

    async def __call__(self, namespace: str, tokens: tuple[int, ...]) -> StoreResult:
        self.texts.append((namespace, ByteTokenizer().decode(tokens)))
        return StoreResult(0 if self._missing else len(tokens), missing=self._missing)


async def results(context: WorkerContext, stored: Stored, *bodies: Any) -> list[Warmed]:
    return [result async for result in warm_prompts(context, stored, bodies)]


async def test_a_prompt_is_computed_and_stored_up_to_its_last_token(context: WorkerContext) -> None:
    stored = Stored()
    (result,) = await results(context, stored, {"messages": [SYSTEM, USER], "tenant": "acme"})
    ((namespace, text),) = stored.texts
    assert (result.number, result.problem) == (1, "")
    assert namespace == "acme"
    assert "[system]Be brief.\n[user]Hello there\n[assistant]".startswith(text)
    assert result.tokens == len(ByteTokenizer().encode(text)) > 20


async def test_of_a_system_prompt_that_part_is_stored_that_all_conversations_share(context: WorkerContext) -> None:
    stored = Stored()
    await results(context, stored, {"messages": [SYSTEM]})
    assert stored.texts == [("", "[system]Be brief.\n[user]")]


async def test_prompts_wait_for_one_another_in_the_offline_lane(context: WorkerContext) -> None:
    assert isinstance(context.engine, FakeEngine)
    async for result in warm_prompts(context, Stored(), [{"messages": [USER]}] * 3):
        assert len(context.engine.sequences) == result.number
        assert not context.engine.running
    assert {request.lane for request in context.engine.sequences} == {"batch"}


async def test_a_prompt_that_cannot_be_computed_leaves_the_others(context: WorkerContext) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    long = {"role": "user", "content": "word " * 3000}
    unknown = {"messages": [USER], "temprature": 1}
    found = await results(context, Stored(), {"messages": [image]}, {"messages": [long]}, unknown, {"messages": [USER]})
    assert [bool(result.problem) for result in found] == [True, True, True, False]
    assert "images" in found[0].problem
    assert "temprature" in found[2].problem


@pytest.mark.parametrize("missing", [None, NotStored.QUOTA])
async def test_a_result_says_why_a_prefix_is_not_on_disk(context: WorkerContext, missing: NotStored | None) -> None:
    (result,) = await results(context, Stored(missing), {"messages": [USER]})
    assert (result.problem, result.missing) == ("", missing.value if missing else "")


@pytest.mark.parametrize(("missing", "warnings"), [(NotStored.QUOTA, 1), (NotStored.NO_FOLDER, 0), (None, 0)])
async def test_a_worker_logs_what_could_not_be_stored_unless_it_has_no_folder(
    context: WorkerContext, caplog: pytest.LogCaptureFixture, missing: NotStored | None, warnings: int
) -> None:
    with caplog.at_level(logging.WARNING, "sluice.warm"):
        await warm_and_log(context, Stored(missing), [{"messages": [USER]}])
    assert len(caplog.records) == warnings


@pytest.mark.parametrize(("missing", "warmed"), [(None, 1), (NotStored.QUOTA, 1), (NotStored.TOO_SHORT, 0)])
async def test_a_conversation_that_is_left_out_does_not_count_as_warmed(
    context: WorkerContext, caplog: pytest.LogCaptureFixture, missing: NotStored | None, warmed: int
) -> None:
    with caplog.at_level(logging.INFO, "sluice.warm"):
        await warm_and_log(context, Stored(missing), [{"messages": [USER]}])
    assert f"warmed {warmed} of 1 conversations" in caplog.text


@pytest.mark.parametrize(
    ("conversation", "kind"),
    [(7, "a number"), (True, "true or false"), (None, "null"), ({}, "an object without a list of messages")],
)
def test_a_conversation_of_another_kind_is_named_in_the_words_of_json(
    tmp_path: Path, conversation: Any, kind: str
) -> None:
    with pytest.raises(BadWarmFile, match=f"conversation 1 is {kind}; "):
        read_conversations(written(tmp_path, [conversation, conversation]))
