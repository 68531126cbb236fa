"""Runs at a server with OpenAI's Files and Batches alone: nothing here depends on fields of ours."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice import Batch, Client
from sluice.batch import remote as module
from sluice.batch.remote import RemoteBatches, RemoteError
from sluice.batch.remote_run import run_remote, submit_remote
from sluice.errors import BatchRefused, BatchTaken
from tests.batch.helpers import ids, leave, line, read, write
from tests.batch.openai_server import Fault, OpenAIServer, openai_server
from tests.queue.helpers import until

LOST = 0  # bytes of an answer that arrive


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat requests and polls without the pauses."""
    sleep = asyncio.sleep

    async def shortly(_: float) -> None:
        await sleep(0.001)

    monkeypatch.setattr(module.asyncio, "sleep", shortly)


async def run(server: OpenAIServer, folder: Path, **how: Any) -> Batch:
    async with RemoteBatches(server.url, how.pop("key", None), patience_s=5) as remote:
        return await run_remote(remote, folder / "in.jsonl", folder / "out.jsonl", **how)


def some(folder: Path, *names: str) -> Path:
    return write(folder / "in.jsonl", *(line(name) for name in names or ("a", "b", "c")))


async def test_a_file_is_uploaded_run_and_its_answers_are_fetched(server: OpenAIServer, tmp_path: Path) -> None:
    some(tmp_path, "a", "bad", "c")
    seen = list[str]()
    batch = await run(server, tmp_path, on_progress=lambda batch: seen.append(batch.status))
    assert (ids(tmp_path / "out.jsonl"), ids(tmp_path / "out.errors.jsonl")) == (["a", "c"], ["bad"])
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 2, 1)
    assert (batch.output_file_id, batch.input_file_id) == (str(tmp_path / "out.jsonl"), str(tmp_path / "in.jsonl"))
    assert seen == ["in_progress", "completed"]
    assert batch.sluice.seconds == pytest.approx(7, abs=1)
    async with Client("redis://127.0.0.1:1") as client:
        with pytest.raises(BatchRefused, match=f"ran at {server.url}: lines can be run again where"):
            await client.rerun_batch(tmp_path / "out.jsonl")


async def test_a_run_that_has_ended_is_reported_again_without_its_server(server: OpenAIServer, tmp_path: Path) -> None:
    some(tmp_path)
    first = await run(server, tmp_path)
    before = len(server.requests)
    assert await run(server, tmp_path) == first
    assert len(server.requests) == before


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST /v1/files", 503),
        Fault("POST /v1/files", cut=LOST),
        Fault("POST /v1/batches", 429, (("retry-after", "1"),)),
        Fault("POST /v1/batches", cut=LOST),
        Fault("GET /v1/batches", 500),
        Fault("GET /v1/batches/", cut=LOST),
        Fault("/content", 502),
        Fault("/content", cut=LOST),
        Fault("/content", cut=100),
    ],
    ids=str,
)
@pytest.mark.parametrize("times", [1, 3])
async def test_a_fault_that_passes_changes_nothing(
    server: OpenAIServer, tmp_path: Path, fault: Fault, times: int
) -> None:
    some(tmp_path)
    server.models = ("default",)  # whose list is the first answer: a server that never answered is not waited for
    server.faults = [fault] * times
    batch = await run(server, tmp_path, served_only=True)
    assert (batch.status, ids(tmp_path / "out.jsonl")) == ("completed", ["a", "b", "c"])
    assert len(server.faults) < times
    assert len(server.batches) == 1, "a run whose creation was not answered is found"


@pytest.mark.parametrize("ranges", [True, False])
async def test_a_download_that_breaks_off_is_continued_if_the_server_has_ranges(
    server: OpenAIServer, tmp_path: Path, ranges: bool
) -> None:
    some(tmp_path)
    server.ranges, server.faults = ranges, [Fault("/content", cut=100), Fault("/content", 503)]
    await run(server, tmp_path)
    assert ids(tmp_path / "out.jsonl") == ["a", "b", "c"]
    assert ("range 100" in server.requests) == ranges


async def test_a_file_that_is_longer_than_the_answers_is_written_anew(server: OpenAIServer, tmp_path: Path) -> None:
    some(tmp_path)
    await run(server, tmp_path)
    server.ranges = True
    with (tmp_path / "other").open("w+b") as file:
        file.write(b"x" * 10_000)
        async with RemoteBatches(server.url) as remote:
            await remote.download("file-2", file)
    assert (tmp_path / "other").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


async def test_a_run_is_made_once_without_a_list_of_runs_too(server: OpenAIServer, tmp_path: Path) -> None:
    some(tmp_path)
    server.lists = False
    assert (await run(server, tmp_path)).status == "completed"


@pytest.mark.parametrize("path", ["POST /v1/files", "POST /v1/batches", "GET /v1/batches/", "/content"])
@pytest.mark.parametrize("answered", [True, False])
async def test_a_command_that_is_killed_goes_on_with_the_same_run(
    server: OpenAIServer, tmp_path: Path, path: str, answered: bool
) -> None:
    """Killed after the request, of which the server has or has not received all."""
    some(tmp_path)
    server.models = ("default",)
    server.faults = [Fault(path, cut=LOST)] if answered else [Fault(path, 503)]
    task = asyncio.create_task(run(server, tmp_path, served_only=True))
    await until(lambda: not server.faults)
    task.cancel()
    await asyncio.wait([task])
    batch = await run(server, tmp_path)
    assert (batch.status, ids(tmp_path / "out.jsonl"), len(server.batches)) == ("completed", ["a", "b", "c"], 1)


async def test_an_upload_that_the_server_does_not_have_any_more_is_repeated(
    server: OpenAIServer, tmp_path: Path
) -> None:
    some(tmp_path)
    server.faults = [Fault("POST /v1/batches", 400)]
    with pytest.raises(RemoteError, match="Fault 400"):
        await run(server, tmp_path)
    server.files.clear()
    assert (await run(server, tmp_path)).status == "completed"
    assert server.count("POST /v1/files") == 2


async def test_a_refused_file_leaves_nothing_here_or_there(server: OpenAIServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("b", url="/v1/embeddings"))
    batch = await run(server, tmp_path)
    assert batch.errors is not None
    assert [(each.code, each.line) for each in batch.errors.data] == [("mismatched_url", 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert server.files == {}


async def test_other_input_or_models_or_server_for_the_same_output_are_refused(
    server: OpenAIServer, tmp_path: Path
) -> None:
    some(tmp_path)
    server.stops_at = "in_progress"
    task = asyncio.create_task(run(server, tmp_path))
    await until(lambda: server.count("GET /v1/batches/batch_1") > 2)
    with pytest.raises(BatchTaken):
        await run(server, tmp_path)
    task.cancel()
    await asyncio.wait([task])
    with pytest.raises(BatchRefused, match="--map"):
        await run(server, tmp_path, models={"*": "other"})
    with openai_server() as other, pytest.raises(BatchRefused, match=f"--url {server.url}"):
        await run(other, tmp_path)
    some(tmp_path, "another")
    with pytest.raises(BatchRefused, match="another input"):
        await run(server, tmp_path)
    some(tmp_path)
    server.stops_at = "completed"
    assert (await run(server, tmp_path)).status == "completed"


async def test_a_run_of_this_machine_and_one_at_a_server_never_resume_each_other(
    server: OpenAIServer, client: Client, tmp_path: Path
) -> None:
    many = some(tmp_path)
    await run(server, tmp_path)
    with pytest.raises(BatchRefused, match=f"give --url {server.url}"):
        await client.batch(many, tmp_path / "out.jsonl")
    task = asyncio.create_task(client.batch(many, tmp_path / "local.jsonl"))
    state = tmp_path / "local.jsonl.run"
    await until(lambda: (state.exists() and state.stat().st_size > 0) or task.done())
    await leave(task)
    async with RemoteBatches(server.url) as remote:
        with pytest.raises(BatchRefused, match="--redis-url"):
            await run_remote(remote, many, tmp_path / "local.jsonl")


async def test_a_file_of_somebody_else_is_not_overwritten(server: OpenAIServer, tmp_path: Path) -> None:
    some(tmp_path)
    (tmp_path / "out.jsonl").write_text("precious\n")
    with pytest.raises(BatchRefused, match="already exists"):
        await run(server, tmp_path)
    assert ((tmp_path / "out.jsonl").read_text(), server.requests) == ("precious\n", [])


async def test_names_of_models_are_mapped_before_the_lines_are_sent(server: OpenAIServer, tmp_path: Path) -> None:
    lines = [line("a", model="gpt-4o-mini", seed=7), line("b", model="own"), line("c")]
    write(tmp_path / "in.jsonl", *lines)
    await run(server, tmp_path, models={"gpt-4o*": "big", "*": "small"})
    sent = [json.loads(raw) for raw in server.files["file-1"][1].splitlines()]
    assert [each["body"].get("model") for each in sent] == ["big", "small", "small"]
    assert sent[0]["body"]["seed"] == 7
    assert read(tmp_path / "in.jsonl") == lines


async def test_without_a_mapping_the_bytes_of_the_file_are_sent(server: OpenAIServer, tmp_path: Path) -> None:
    content = b'{"custom_id":"a", "url" : "/v1/chat/completions","method":"POST","body":{"messages":[]}}\r\n'
    (tmp_path / "in.jsonl").write_bytes(content)
    await run(server, tmp_path)
    assert server.files["file-1"][1] == content


async def test_a_model_that_the_server_does_not_have_is_refused_with_the_option_that_mends_it(
    server: OpenAIServer, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", line("a", model="gpt-4o-mini"))
    server.models = ("small",)
    batch = await run(server, tmp_path, served_only=True)
    assert (batch.status, [each.code for each in batch.errors.data]) == ("failed", ["unserved_model"])
    assert "--map gpt-4o-mini=small" in batch.errors.data[0].message
    assert ([path.name for path in tmp_path.iterdir()], server.files) == (["in.jsonl"], {})
    assert (await run(server, tmp_path)).status == "completed"


async def test_the_endpoint_is_that_of_the_lines(server: OpenAIServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a", url="/v1/embeddings"))
    assert (await run(server, tmp_path)).status == "completed"
    assert server.batches["batch_1"].endpoint == "/v1/embeddings"


async def test_a_key_is_sent_and_its_refusal_has_its_status(server: OpenAIServer, tmp_path: Path) -> None:
    some(tmp_path)
    server.key = "secret"
    with pytest.raises(RemoteError) as refused:
        await run(server, tmp_path)
    assert refused.value.status == 401
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert (await run(server, tmp_path, key="secret")).status == "completed"


async def test_what_is_no_such_server_is_refused_at_once(tmp_path: Path) -> None:
    some(tmp_path)
    with pytest.raises(RemoteError, match="no server answers at"):
        await run(OpenAIServer("http://127.0.0.1:9"), tmp_path)
    for url in ("localhost:8000", "http://", "redis://localhost", "http://a:b@localhost", "http://h:x", "http://[1"):
        with pytest.raises(ValueError, match="URL"):
            RemoteBatches(url)
    with pytest.raises(ValueError, match="key"):
        RemoteBatches("http://localhost", "a\nb")


async def test_runs_are_listed_over_all_pages_oldest_first_and_cancelled(server: OpenAIServer, tmp_path: Path) -> None:
    file = some(tmp_path)
    server.stops_at = "cancelled"
    async with RemoteBatches(f"{server.url}/v1/") as remote:
        for _ in range(5):
            await submit_remote(remote, file)
        assert [batch.id for batch in await remote.batches()] == [f"batch_{number}" for number in range(1, 6)]
        assert (await remote.cancel_batch("batch_3")).ended is False
        await remote.batch_status("batch_3")
        assert (await remote.cancel_batch("batch_3")).status == "cancelled"
        with pytest.raises(RemoteError) as unknown:
            await remote.batch_status("batch_9")
    assert unknown.value.status == 404


async def test_patience_has_an_end(server: OpenAIServer, tmp_path: Path) -> None:
    server.faults = [Fault("GET", 503)] * 1000
    async with RemoteBatches(server.url, patience_s=0.1) as remote:
        with pytest.raises(RemoteError) as refused:
            await remote.batches()
    assert refused.value.status == 503


@pytest.mark.parametrize("answer", [b"[]", b'{"data": 5}', b'{"data": [{"id": "a"}]}', b"<html>", b'{"data": [[]]}'])
async def test_an_answer_of_another_kind_is_named(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with RemoteBatches(f"http://127.0.0.1:{port}") as remote:
            with pytest.raises(RemoteError, match="OpenAI's interface"):
                await remote.batches()
