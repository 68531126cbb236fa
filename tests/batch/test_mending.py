"""Runs that mend themselves: lines that were cut, invalid, refused or failed are run again, and end once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice import Batch, BatchRefused, Client
from sluice.batch import files
from sluice.batch.files import ResultFiles
from sluice.contract.batch import line_job_id
from tests.batch.helpers import ANY, Chat, leave, left, read, says, write
from tests.queue.helpers import until

JSON = {"response_format": {"type": "json_object"}}


def cut(custom_id: str, needs: int, limit: int, **more: Any) -> dict[str, Any]:
    return says(custom_id, custom_id, needs=needs, max_tokens=limit, **more)


def broken(custom_id: str, times: int, **more: Any) -> dict[str, Any]:
    return says(custom_id, custom_id, broken=times, **JSON, **more)


def kinds(batch: Batch) -> dict[str, int]:
    return {kind: sums.lines for kind, sums in batch.sluice.kinds.items()}


def outcomes(out: Path) -> dict[str, tuple[str, str]]:
    """Return the file and the kind of each line's outcome; fails if a line has two."""
    errors = out.with_name("out.errors.jsonl")
    lines = [(path.name, said) for path in (out, errors) if path.exists() for said in read(path)]
    assert len({said["custom_id"] for _, said in lines}) == len(lines)
    return {said["custom_id"]: (name, said["sluice"]["kind"]) for name, said in lines}


# Counts


async def test_each_kind_is_counted_apart_with_what_it_took(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(
        tmp_path / "in.jsonl",
        *(says(f"good{k}", f"good{k}", needs=3) for k in range(5)),
        *(cut(f"cut{k}", 9, 2) for k in range(3)),
        *(broken(f"broken{k}", 9) for k in range(2)),
        says("shy", "shy", shy=9),
        says("failed", fails=9, refuse="invalid_request", retryable=False),
    )
    batch = await client.batch(many, out, models=ANY)
    assert kinds(batch) == {"answered": 5, "cut": 3, "refused": 1, "invalid": 2, "failed": 1}
    cuts = batch.sluice.kinds["cut"]
    assert (cuts.input_tokens, cuts.cached_tokens, cuts.output_tokens, cuts.machine_s) == (30, 12, 6, 4.5)
    assert (batch.request_counts.completed, batch.request_counts.failed, batch.sluice.cut_off) == (9, 3, 3)
    assert batch.usage.output_tokens == 5 * 3 + 3 * 2 + 1, "of the answers"
    assert [(slow.seconds, slow.output_tokens) for slow in batch.sluice.slowest] == [(4.0, 3)] * 5
    assert await client.batch_status(batch.id) == batch
    assert await client.batch(many, out, models=ANY) == batch


async def test_an_output_of_an_earlier_version_is_counted_by_its_bodies(tmp_path: Path, out: Path) -> None:
    def old(reason: str, code: str | None = None) -> dict[str, Any]:
        body = {"choices": [{"finish_reason": reason}], "usage": {"completion_tokens": 2}}
        response = {"status_code": 200, "request_id": "batch_1-1", "body": body}
        return {"id": "batch_1-1", "custom_id": reason, "response": response, "error": code and {"code": code}}

    write(out, old("length"), old("stop"), old("content_filter"))
    write(out.with_name("err.jsonl"), old("x", "answer_not_json"), {**old("y", "batch_expired"), "response": None})
    counts = ResultFiles(out, out.with_name("err.jsonl")).counts
    assert {kind: (sums.lines, sums.output_tokens) for kind, sums in counts.kinds.items()} == {
        "answered": (1, 2), "cut": (1, 2), "refused": (1, 2), "invalid": (1, 2), "failed": (1, 0),
    }  # fmt: skip
    assert (counts.completed, counts.failures.total(), counts.usage.output_tokens) == (3, 2, 6)


# Retries


async def test_without_the_option_nothing_is_run_again(client: Client, chat: Chat, tmp_path: Path, out: Path) -> None:
    batch = await client.batch(write(tmp_path / "in.jsonl", cut("a", 9, 2), broken("b", 1)), out, models=ANY)
    assert (kinds(batch), len(chat.began)) == ({"cut": 1, "invalid": 1}, 2)
    assert not out.with_name("out.jsonl.retries").exists()


async def test_cut_answers_are_run_again_with_twice_the_tokens_until_they_end(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    other = says("other", "other", needs=9, max_completion_tokens=3)
    many = write(tmp_path / "in.jsonl", cut("once", 4, 3), cut("twice", 9, 3), cut("never", 99, 3), other, says("good"))
    batch = await client.batch(many, out, models=ANY, retry={"cut": 2})
    asked = [(request["say"][0], request.get("max_tokens")) for request in chat.requests]
    limits = {name: [limit for said, limit in asked if said == name] for name in ("once", "twice", "never")}
    assert limits == {"once": [3, 6], "twice": [3, 6, 12], "never": [3, 6, 12]}
    assert kinds(batch) == {"answered": 4, "cut": 1, "replaced": 7}
    assert batch.sluice.retried == 4
    found = {said["custom_id"]: said for said in read(out)}
    assert found["never"]["response"]["body"]["usage"]["completion_tokens"] == 12, "the longest answer"
    assert found["never"]["id"] == found["never"]["response"]["request_id"] == line_job_id(batch.id, 3, 2)
    assert await left(db) == []


async def test_invalid_and_refused_answers_are_run_again_with_another_seed_and_a_temperature(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(
        tmp_path / "in.jsonl",
        broken("a", 2, seed=5, temperature=0),
        broken("b", 1, temperature=0.2),
        says("c", "c", shy=1, seed=2**63 - 1),
        broken("d", 9),
    )
    batch = await client.batch(many, out, models=ANY, retry={"invalid": 2, "refused": 2})
    sent = {name: [r for r in chat.requests if r["say"] == [name]] for name in "abcd"}
    assert [(r["seed"], r["temperature"]) for r in sent["a"]] == [(5, 0), (6, 0.7), (7, 0.7)]
    assert [(r.get("seed"), r["temperature"]) for r in sent["b"]] == [(None, 0.2)] * 2, "the seed is of the job's id"
    assert [r["seed"] for r in sent["c"]] == [2**63 - 1, 2**63 - 2], "within the range of seeds"
    assert (len(sent["d"]), kinds(batch)) == (3, {"answered": 3, "invalid": 1, "replaced": 6})
    assert outcomes(out)["d"] == ("out.errors.jsonl", "invalid")


async def test_an_answer_in_json_that_was_cut_is_run_again_for_either_kind_with_more_tokens(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", broken("a", 1, needs=4, max_tokens=3, seed=1))
    for kind in ("cut", "invalid"):
        chat.requests.clear()
        chat._tries.clear()
        batch = await client.batch(many, tmp_path / f"{kind}.jsonl", models=ANY, retry={kind: 2})
        assert kinds(batch) == {"answered": 1, "replaced": 1}
        assert [(r["max_tokens"], r["seed"]) for r in chat.requests] == [(3, 1), (6, 2)]


async def test_a_failed_line_has_five_tries_again_but_a_request_at_fault_has_none(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(
        tmp_path / "in.jsonl",
        says("mended", "a", fails=7),
        says("lost", "b", fails=99),
        says("bad", "c", fails=9, refuse="invalid_request", retryable=False),
    )
    batch = await client.batch(many, out, models=ANY, retry={"failed": 2})
    assert {name: chat._tries[f"['{name}']"] for name in "abc"} == {"a": 8, "b": 15, "c": 1}
    assert (kinds(batch), outcomes(out)["mended"][0]) == ({"answered": 1, "failed": 2, "replaced": 3}, "out.jsonl")


async def test_what_the_context_or_the_worker_s_memory_has_cut_is_not_run_again(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    choice = {"index": 0, "message": {"content": "x"}, "finish_reason": "length"}
    chat._completion = lambda request, tries: {  # type: ignore[method-assign]
        "model": "default", "choices": [choice], "usage": {"completion_tokens": 3, "prompt_tokens": 9},
    }  # fmt: skip
    batch = await client.batch(
        write(tmp_path / "in.jsonl", cut("a", 9, 8)), out, models=ANY, retry={"cut": 2, "invalid": 2, "failed": 2}
    )
    assert (kinds(batch), len(chat.began)) == ({"cut": 1}, 1)


async def test_an_answer_without_a_limit_in_its_request_gets_one_and_that_is_said(
    client: Client, chat: Chat, tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = write(tmp_path / "in.jsonl", says("a", "a", needs=150), says("b", "b", needs=120))
    batch = await client.batch(many, out, models=ANY, retry={"cut": 1})
    assert kinds(batch) == {"answered": 2, "replaced": 2}
    assert sorted(request.get("max_tokens", 0) for request in chat.requests) == [0, 0, 200, 200]
    (note,) = [record.getMessage() for record in caplog.records if "max_tokens" in record.getMessage()]
    assert "cut off at 100 tokens, and its request has no max_tokens, so it is run again with twice as many" in note


@pytest.mark.parametrize("name", ["default", "alias"])
async def test_a_limit_is_raised_to_what_workers_publish(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path, name: str
) -> None:
    await db.hset("sluice:aliases", "alias", "default")
    lowest = {"a": ("100", "8"), "b": ("17", ""), "c": ("x", "5" * 40)}
    for worker, (context, most) in lowest.items():
        fields = {"name": worker, "model": "default", "context_tokens": context, "max_output_tokens": most}
        await db.hset(f"sluice:worker:{worker}", mapping=fields)
    many = write(tmp_path / "in.jsonl", cut("a", 99, 3))
    batch = await client.batch(many, out, models={"*": name}, retry={"cut": 9})
    assert [request["max_tokens"] for request in chat.requests] == [3, 6, 7], "10 of 17 tokens are the prompt's"
    assert kinds(batch) == {"cut": 1, "replaced": 2}


ODD = 'a\u2028",",\\"line":é'


async def test_a_worse_outcome_of_a_retry_does_not_replace_an_answer(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", cut(ODD, 9, 3, later="internal"), broken("b", 1, later="internal"), says("c"))
    batch = await client.batch(many, out, models=ANY, retry={"cut": 2, "invalid": 2})
    assert outcomes(out) == {
        ODD: ("out.jsonl", "cut"), "b": ("out.errors.jsonl", "invalid"), "c": ("out.jsonl", "answered"),
    }  # fmt: skip
    assert kinds(batch) == {"answered": 1, "cut": 1, "invalid": 1}, "a failure took nothing"
    found = {said["custom_id"]: said for said in read(out)}[ODD]
    assert found["response"]["body"]["usage"]["completion_tokens"] == 3
    assert (found["response"]["request_id"], found["id"]) == (line_job_id(batch.id, 1), line_job_id(batch.id, 1, 1))
    assert batch.sluice.retried == 2
    assert await left(db) == []


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_a_run_that_ends_early_keeps_the_answers_that_were_run_again(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path, how: str
) -> None:
    lines = [cut("cut", 9, 3, later="hang"), broken("broken", 1, later="hang"), says("new", then="hang")]
    many = write(tmp_path / "in.jsonl", *lines)
    options: dict[str, Any] = {"retry": {"cut": 2, "invalid": 2}, "models": ANY}
    task = asyncio.create_task(client.batch(many, out, **options))
    await until(lambda: len(chat.began) == 5)
    if how == "expired":
        await leave(task)
        task = asyncio.create_task(client.batch(many, out, completion_window="1s"))
    else:
        (run,) = await client.batches()
        await client.cancel_batch(run.id)
    batch = await task
    assert (batch.status, kinds(batch)) == (how, {"cut": 1, "invalid": 1, "failed": 1})
    assert outcomes(out)["cut"][0] == "out.jsonl"
    assert batch.sluice.failures == {"answer_not_json": 1, f"batch_{how}": 1}


@pytest.mark.parametrize(
    "text",
    [
        '{"choices": 5, "usage": [], "sluice": {"timings": 3}}',
        '{"choices": [4], "usage": {"completion_tokens": "many", "prompt_tokens_details": 3}}',
        '{"choices": [{"message": 7, "finish_reason": 3}], "sluice": {"rows_mean": {}, "timings": {"ttft_s": 1e400}}}',
    ],
)
async def test_a_foreign_result_is_an_answer_and_stops_nothing(
    client: Client, db: Redis, tmp_path: Path, out: Path, text: str
) -> None:
    task = asyncio.create_task(client.batch(write(tmp_path / "in.jsonl", says("a")), out, models=ANY))
    await until(lambda: db.exists("sluice:queue:default:batch"))
    (run,) = await client.batches()
    await db.set(f"sluice:result:{run.id}-1", text)
    assert kinds(await task) == {"answered": 1}
    assert (await client.batch_status(run.id)).sluice.slowest == ()


@pytest.mark.parametrize("text", ["[]", "5", "{", '{"type": "failed"}', '{"type": "failed", "error": 5}', "[" * 99_999])
async def test_a_result_that_no_worker_wrote_fails_its_line_alone(
    client: Client, db: Redis, tmp_path: Path, out: Path, text: str
) -> None:
    task = asyncio.create_task(client.batch(write(tmp_path / "in.jsonl", says("a")), out, models=ANY))
    await until(lambda: db.exists("sluice:queue:default:batch"))
    (run,) = await client.batches()
    await db.set(f"sluice:result:{run.id}-1", text)
    batch = await task
    assert (batch.status, batch.sluice.failures) == ("completed", {"internal": 1})


# Crashes


async def test_a_resumed_run_goes_on_with_the_retry_and_loses_no_answer_of_a_server_that_forgot_all(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", cut("a", 99, 3, later="hang"), broken("b", 9, seed=1, later="hang"))
    task = asyncio.create_task(client.batch(many, out, models=ANY, retry={"cut": 2, "invalid": 2}))
    await until(lambda: len(chat.began) == 4)
    await leave(task)
    await db.flushall()
    chat.requests.clear()
    task = asyncio.create_task(client.batch(many, out))
    await until(lambda: len(chat.requests) == 2)
    assert {r["say"][0]: (r.get("max_tokens"), r.get("seed")) for r in chat.requests} == {
        "a": (6, None),
        "b": (None, 2),
    }
    (run,) = await client.batches()
    await client.cancel_batch(run.id)
    batch = await task
    assert outcomes(out) == {"a": ("out.jsonl", "cut"), "b": ("out.errors.jsonl", "invalid")}
    assert batch.sluice.retry == {"cut": 2, "invalid": 2}


@pytest.mark.parametrize("step", ["before it is kept", "once it is kept", "before its end is written"])
async def test_a_crash_at_any_step_repeats_no_retry(
    client: Client, chat: Chat, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The process ends at the step, as in a `kill -9`; each of the jobs is on the server still."""
    many = write(tmp_path / "in.jsonl", cut("a", 99, 3), broken("b", 9), cut("c", 5, 3), says("d"))
    keep, add, crashes = ResultFiles.keep, ResultFiles.add, 0

    def kept(results: ResultFiles, records: Any) -> None:
        nonlocal crashes
        crashes += 1
        if step == "once it is kept":
            keep(results, records)
        if step != "before its end is written" and crashes % 2:
            raise KilledError
        if step != "once it is kept":
            keep(results, records)

    def added(results: ResultFiles, ended: Any) -> None:
        nonlocal crashes
        crashes += 1
        if step == "before its end is written" and crashes % 2:
            raise KilledError
        add(results, ended)

    monkeypatch.setattr(ResultFiles, "keep", kept)
    monkeypatch.setattr(ResultFiles, "add", added)
    batch = None
    while batch is None:
        try:
            batch = await client.batch(many, out, models=ANY, retry={"cut": 2, "invalid": 2})
        except KilledError:
            continue
    assert crashes > 2
    assert kinds(batch) == {"answered": 2, "cut": 1, "invalid": 1, "replaced": 5}
    assert len(chat.began) == 3 + 3 + 2 + 1, "each job once"
    assert outcomes(out)["a"] == ("out.jsonl", "cut")


class KilledError(Exception):
    """Stands for the end of the process."""


def test_kept_outcomes_cut_off_at_any_byte_are_read_up_to_there(tmp_path: Path) -> None:
    lines = [files.LineResult(f"batch_1-{k}", f"r{k}", result=b'{"choices":[]}') for k in range(3)]
    results = ResultFiles(tmp_path / "out", tmp_path / "err")
    results.keep([files.kept_record(each.as_line(), 1, 1, {"seed": 3}) for each in lines])
    results.close()
    whole = (tmp_path / "out.retries").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "out.retries").write_bytes(whole[:length])
        results = ResultFiles(tmp_path / "out", tmp_path / "err")
        found = [results.kept(files.custom_id_digest(f"r{k}")) for k in range(3)]
        assert [each is not None for each in found] == [whole[:length].count(b"\n") > k for k in range(3)]
        results.close()


def test_a_file_that_is_no_file_of_kept_outcomes_is_refused(tmp_path: Path) -> None:
    for text in ("notes\n", "{}\n", '{"retry": 1, "mends": 0, "changes": {}, "line": {"id": "a"}}\n'):
        (tmp_path / "out.retries").write_text(text)
        with pytest.raises(BatchRefused, match="was not written by a run"):
            ResultFiles(tmp_path / "out", tmp_path / "err")


# Options


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"retry": {"cut": 2, "slow": 1}},
            "'slow' is not a kind of line to run again; give some of invalid, cut, failed, refus",
        ),
        ({"retry": {"": 1}}, "'' is not a kind"),
        ({"retry": {"cut": 0}}, "again 1 to 10 times"),
        ({"retry": {"cut": 11}}, "again 1 to 10 times"),
    ],
)
async def test_bad_options_are_refused_with_a_sentence(
    client: Client, tmp_path: Path, out: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        await client.batch(write(tmp_path / "in.jsonl", says("a")), out, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


async def test_a_new_run_writes_over_no_kept_outcomes(client: Client, tmp_path: Path, out: Path) -> None:
    kept = out.with_name("out.jsonl.retries")
    kept.write_text("mine")
    with pytest.raises(BatchRefused, match="already exists, and is not a file of this run"):
        await client.batch(write(tmp_path / "in.jsonl", says("a")), out)
    assert kept.read_text() == "mine"
