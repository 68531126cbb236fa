"""`sluice capture` and `sluice replay` over a real server and worker."""

import asyncio
import errno
import json
import re
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from models.tiny_vision import write_checkpoint as write_seeing
from sluice import Client
from sluice.capture.file import CapturedJob, CaptureWriter
from sluice.capture.recorder import Recorder, Wanted, _Followed, _Queues, _Submitted
from sluice.capture.redaction import redacted
from sluice.contract import keys
from sluice.contract.keys import JobFunction
from sluice.mapped import MappedClient
from tests.end_to_end.test_cli import Command
from tests.end_to_end.test_users import admin as admin
from tests.end_to_end.test_users import url_of
from tests.images.pictures import data_url, patch, saved
from tests.support.embedding import write_checkpoint as write_embedding
from tests.support.stack import GatewayProcess, Server, WorkerProcess

_TIMEOUT_S = 60
COUNT = {"messages": [{"role": "user", "content": "Count to 12."}], "temperature": 0}
SAMPLED = {
    "messages": [{"role": "user", "content": "Hello!"}],
    "temperature": 1.5,
    "max_tokens": 30,
    "ignore_eos": True,
}
REFUSED = {"messages": [{"role": "user", "content": "Secret words."}], "temperature": 5}
ENDLESS = {**COUNT, "max_tokens": 30_000, "logit_bias": {"0": -100, "2": -100}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_weather",
            "description": "Weather of a town",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
                "required": ["town", "days"],
                "additionalProperties": False,
            },
        },
    }
]
CALLED = {
    **SAMPLED,
    "messages": [{"role": "user", "content": "Accra?"}],
    "ignore_eos": None,
    "max_tokens": 200,
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "find_weather"}},
}


@contextmanager
def capturing(sluice: Command, *args: str) -> Iterator["subprocess.Popen[str]"]:
    """Run `sluice capture` once it listens."""
    with sluice.running("capture", "-o", "capture.jsonl", *args) as process:
        assert process.stderr is not None
        while "recorded," not in (line := process.stderr.readline()):
            assert line, "it ended"
        time.sleep(0.3)  # it notes its state a little before it has subscribed
        yield process


def submit(sluice: Command, request: dict[str, Any], job_id: str, *args: str) -> None:
    wait = [] if "--model" in args else ["--wait"]
    sluice("submit", "--file", "-", "--id", job_id, *wait, *args, stdin=json.dumps(request))


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=_TIMEOUT_S)
    return process.returncode, out, err


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    head, *jobs = [json.loads(line) for line in (folder / "capture.jsonl").read_text().splitlines()]
    return head, jobs


def verdicts(out: str) -> dict[str, str]:
    return {each["job"]: each["verdict"] for each in map(json.loads, out.splitlines())}


@pytest.mark.usefixtures("alive")
def test_the_next_jobs_are_recorded_and_their_replay_is_equal(sluice: Command, tmp_path: Path) -> None:
    with capturing(sluice, "--next", "4") as process:
        submit(sluice, COUNT, "greedy")
        submit(sluice, SAMPLED, "drawn")
        submit(sluice, {**SAMPLED, "seed": -7}, "seeded")
        submit(sluice, CALLED, "called")
        submit(sluice, COUNT, "a-fifth")
        code, out, err = ended(process)
    assert (code, out) == (0, "capture.jsonl\n"), err
    assert stat.S_IMODE((tmp_path / "capture.jsonl").stat().st_mode) == 0o600
    head, jobs = read(tmp_path)
    assert (head["sluice_capture"], head["redacted"]) == (1, False)
    assert [(job["id"], job["state"]) for job in jobs] == [
        (name, "finished") for name in ("greedy", "drawn", "seeded", "called")
    ]
    assert jobs[0]["request"] == COUNT
    assert jobs[0]["events"][0]["fingerprint"] == jobs[0]["stored"]["fingerprint"]
    assert {"mlx", "mlx-lm"} <= jobs[0]["worker"]["packages"].keys()
    assert jobs[0]["worker"]["settings"]["lease_s"] == 2
    code, out, err = sluice("replay", "capture.jsonl", "--json")
    assert (code, set(verdicts(out).values())) == (0, {"equal"}), (out, err)
    code, out, err = sluice("replay", "capture.jsonl", "--job", "2")
    assert (code, out) == (0, "drawn  equal: 30 tokens, finished (length)\n"), err


@pytest.mark.usefixtures("alive")
def test_a_difference_is_named_and_decides_the_exit_code(sluice: Command, tmp_path: Path) -> None:
    with capturing(sluice) as process:
        submit(sluice, COUNT, "greedy")
        ended(process)
    head, (job,) = read(tmp_path)
    deltas = [event for event in job["events"] if event["type"] == "delta"]
    deltas[3]["token_ids"][0] += 1
    text = job["result"]["choices"][0]["message"]["content"]
    job["result"]["choices"][0]["message"]["content"] = text[:5] + "#" + text[6:]
    job["events"][0]["fingerprint"] = "fp_other"
    (tmp_path / "capture.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(job)}\n")
    code, out, _ = sluice("replay", "capture.jsonl")
    assert code == 1
    assert re.fullmatch(
        r"greedy  differs: differs at token 3, text at character 5: recorded '#.*', now '.*'; another model or "
        r"device: recorded fp_other, now fp_\w+\n",
        out,
    ), out
    del job["events"], job["result"]
    (tmp_path / "capture.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(job)}\n")
    code, out, _ = sluice("replay", "capture.jsonl")
    assert (code, out) == (0, "greedy  equal: 0 characters, as far as it was recorded\n")


@pytest.mark.usefixtures("alive")
def test_only_jobs_that_fail_are_recorded_and_those_of_a_tenant(sluice: Command, tmp_path: Path) -> None:
    with capturing(sluice, "--failed", "--tenant", "acme") as process:
        submit(sluice, {**COUNT, "tenant": "acme"}, "good")
        submit(sluice, {**REFUSED, "tenant": "other"}, "of-another")
        submit(sluice, {**REFUSED, "user": "acme"}, "refused")
        assert ended(process)[0] == 0
    _, (job,) = read(tmp_path)
    assert (job["id"], job["state"], job["stored"]["tenant"]) == ("refused", "failed", "acme")
    code, out, _ = sluice("replay", "capture.jsonl")
    assert code == 0
    assert f"{job['id']}  equal: 0 characters, failed (invalid_request: temperature: " in out


@pytest.mark.usefixtures("alive")
def test_ctrl_c_keeps_what_there_is_and_its_replay_ends_there(sluice: Command, tmp_path: Path) -> None:
    with capturing(sluice, "--next", "3") as process:
        submit(sluice, COUNT, "greedy")
        sluice("submit", "--file", "-", "--id", "endless", stdin=json.dumps(ENDLESS))
        sluice.wait_until_running("endless")
        while len(sluice.log("endless")) < 20:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        code, out, err = ended(process)
    sluice("cancel", "endless")
    assert (code, out) == (0, "capture.jsonl\n"), err
    assert "Traceback" not in err
    _, jobs = read(tmp_path)
    assert [(job["id"], job["state"]) for job in jobs] == [("greedy", "finished"), ("endless", "running")]
    assert jobs[1]["request"] == ENDLESS
    begun_at = time.monotonic()
    code, out, err = sluice("replay", "capture.jsonl")
    assert code == 0, (out, err)
    assert re.search(r"endless  equal: \d+ tokens, as far as it was recorded\n", out)
    assert time.monotonic() - begun_at < _TIMEOUT_S / 2
    assert sluice.db.zcard("sluice:queue:default:interactive") == 0


@pytest.mark.usefixtures("alive")
def test_the_replay_of_a_job_that_reached_its_deadline_ends_there(sluice: Command, tmp_path: Path) -> None:
    with capturing(sluice) as process:
        submit(sluice, {**ENDLESS, "deadline_s": 1}, "late")
        assert ended(process)[0] == 0
    _, (job,) = read(tmp_path)
    assert job["events"][-1]["error"]["type"] == "deadline"
    code, out, err = sluice("replay", "capture.jsonl", "--json")
    assert (code, "as far as it was recorded" in out) == (0, True), (out, err)
    again = json.loads(out)["id"]
    assert (sluice.db.hget(f"sluice:job:{again}", "state"), sluice.db.hexists(f"sluice:job:{again}", "deadline")) == (
        "cancelled", False
    )  # fmt: skip


@pytest.mark.usefixtures("alive")
def test_the_replay_of_a_job_that_had_not_begun_ends_with_its_first_token(sluice: Command, tmp_path: Path) -> None:
    job = {"id": "waited", "model": "default", "request": {**COUNT, "max_tokens": 5000, "ignore_eos": True}}
    (tmp_path / "capture.jsonl").write_text("\n".join(map(json.dumps, ({"sluice_capture": 1}, job, ""))))
    code, out, err = sluice("replay", "capture.jsonl", "--json")
    assert code == 0, (out, err)
    assert sluice.db.hget(f"sluice:job:{json.loads(out)['id']}", "state") == "cancelled"


def test_ctrl_c_before_the_first_job_leaves_no_file(sluice: Command, tmp_path: Path) -> None:
    with capturing(sluice, "--model", "nobody") as process:
        process.send_signal(signal.SIGINT)
        code, out, err = ended(process)
    assert (code, out) == (2, "")
    assert err.endswith("sluice: nothing was recorded, so there is no file.\n")
    assert not (tmp_path / "capture.jsonl").exists()


@pytest.mark.usefixtures("alive")
def test_jobs_are_recorded_by_their_ids_also_when_they_have_ended(sluice: Command, tmp_path: Path) -> None:
    submit(sluice, COUNT, "old")
    submit(sluice, COUNT, "waits", "--model", "nobody")
    with capturing(sluice, "--id", "old", "--id", "waits") as process:
        sluice("cancel", "waits")
        assert ended(process)[0] == 0
    _, jobs = read(tmp_path)
    assert [(job["id"], job["state"], job["request"]) for job in jobs] == [
        ("old", "finished", None),
        ("waits", "cancelled", COUNT),
    ]
    assert jobs[0]["result"]["choices"][0]["message"]["content"]
    code, out, err = sluice("replay", "capture.jsonl", "--job", "old")
    assert (code, out.startswith("old  skipped: its request was gone"), "no job could be compared" in err) == (2, 1, 1)
    code, _, err = sluice("replay", "capture.jsonl", "--job", "waits")
    assert (code, "no live worker serves 'nobody'" in err or "nobody" in err) == (2, True)
    code, out, _ = sluice("replay", "capture.jsonl", "--job", "waits", "--model", "default")
    assert (code, out) == (0, "waits  equal: 0 characters, as far as it was recorded\n")
    code, _, err = sluice("capture", "--id", "unknown", "-o", "more.jsonl")
    assert (code, "there is no trace of job 'unknown'" in err) == (2, True)


@pytest.mark.usefixtures("alive")
def test_a_redacted_capture_has_shapes_and_no_words(sluice: Command, tmp_path: Path) -> None:
    spoken = {
        **CALLED,
        "messages": [
            {"role": "system", "content": "Be brave, Ann."},
            {"role": "user", "content": [{"type": "text", "text": "Weather in Accra 2026?"}]},
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": {
                "name": "find_weather", "arguments": '{"town": "Accra", "days": 3}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
        ],
        "seed": 11,
        "metadata": {"customer": "Ann", "number": 4711},
        "user": "ann@example.org",
        "stop": ["Kumasi"],
    }  # fmt: skip
    with capturing(sluice, "--next", "2", "--redact") as process:
        submit(sluice, spoken, "told")
        submit(sluice, {**REFUSED, "tool_choice": {"type": "function", "function": {"name": "lookup"}}}, "refused")
        assert ended(process)[0] == 0
    text = (tmp_path / "capture.jsonl").read_text()
    words = ("Ann", "ann", "Accra", "Weather", "find_weather", "town", "Sunny", "4711", "customer", "Kumasi", "brave",
             "Secret", "lookup", "2026?")  # fmt: skip
    assert [word for word in words if word in text] == []
    head, (told, refused) = read(tmp_path)
    request = told["request"]
    assert head["redacted"]
    assert (request["seed"], request["max_tokens"], request["temperature"]) == (11, 200, 1.5)
    assert request["messages"][0] == {"role": "system", "content": "xx xxxxx, xxx."}
    schema = request["tools"][0]["function"]["parameters"]
    assert [*schema["properties"]] == schema["required"] == ["xxxx", "xxxx1"]
    assert schema["properties"]["xxxx"] == {"type": "string", "maxLength": 8}
    call = request["messages"][2]["tool_calls"][0]["function"]
    assert call == {"name": request["tools"][0]["function"]["name"], "arguments": '{"xxxx": "xxxxx", "xxxx1": 0}'}
    assert {token for event in told["events"] for token in event.get("token_ids", ())} == {0}
    assert refused["events"][-1]["error"]["param"] == "temperature"
    code, _, err = sluice("replay", "capture.jsonl")
    assert (code, "is redacted" in err) == (2, True)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("tool_calls: the arguments of 'Accra' are no JSON object.",
         "tool_calls: the arguments of 'xxxxx' are no JSON object."),
        ("The worker's limit of 'Accra' is 7.", "The worker's limit of 'xxxxx' is 7."),
        ("The request's schema cannot be enforced: no Accra", "The request's schema cannot be enforced: xx xxxxx"),
        ("The model's chat template cannot render these messages: [{'content': 'It's Accr",
         "The model's chat template cannot render these messages: [{'xxxxxxx': 'xx'x xxxx"),
        ("it is not 'Accra, and", "it is not 'xxxxx, xxx"),
    ],
)  # fmt: skip
def test_what_an_error_quotes_is_redacted(message: str, told: str) -> None:
    failed = {"type": "failed", "error": {"type": "invalid_request", "message": message}}
    (event,) = redacted(CapturedJob("a", "m", events=[failed])).events
    assert event["error"]["message"] == told


def test_a_full_disk_leaves_no_file_without_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "capture.jsonl"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            CaptureWriter(path, redacted=False)
    assert not path.exists()


async def test_a_look_reads_no_body_again_and_no_job_of_the_future(client: Client) -> None:
    queues = _Queues(client, "m")
    await queues.begin()

    async def found(**jobs: str) -> list[str]:
        for name, text in jobs.items():
            await client.submit([{"role": "user", "content": text}], model="m", id=name)
        looks = [queues.submitted(), queues.ended()]
        return [each.followed.id for look in looks async for jobs in look for each in jobs]

    await client.redis.set(keys.body("later"), "{}")
    await client.redis.zadd(keys.queue("m", "interactive"), {"later": (time.time() + 3600) * 1000})
    assert await found(first="a") == ["first"]
    assert await found(large="a" * 1_000_000) == ["large"]
    sent = (await client.redis.info("stats"))["total_net_output_bytes"]
    assert await found() == await found() == []
    await client.redis.zadd(keys.captured("m"), {"of another program": 0, "of another program:too": time.time() * 1000})
    await client.cancel("large")
    assert await found() == ["large"]
    assert await found() == await found() == []
    assert (await client.redis.info("stats"))["total_net_output_bytes"] - sent < 1_100_000


async def test_nothing_is_kept_of_a_job_that_ends_while_no_capture_runs(client: Client) -> None:
    for model in ("m", "other"):
        await client.submit(COUNT, model=model, id=model)
    await _Queues(client, "other").begin()
    for model in ("m", "other"):
        await client.cancel(model)
    kept = {key.decode() async for key in client.redis.scan_iter("sluice:captured:*")}
    assert kept == {keys.captured("other"), keys.captured("other", "other")}
    assert all([0 < await client.redis.pttl(key) <= 10_000 for key in kept])


@pytest.mark.usefixtures("alive")
def test_each_of_many_jobs_that_end_within_milliseconds_is_recorded(sluice: Command, tmp_path: Path) -> None:
    with capturing(sluice, "--next", "100", "--failed") as process:
        for number in range(100):
            body = {"t": None, "f": "chat", "a": [{**REFUSED, "user": f"user {number}"}], "k": {}, "et": 1}
            sluice.db.set(f"arq:job:refused-{number}", json.dumps(body), ex=600)
            sluice.db.zadd("sluice:queue:default:interactive", {f"refused-{number}": time.time() * 1000})
            sluice.db.publish("sluice:wake:default", "")
            time.sleep(0.005)
        code, _, err = ended(process)
    assert code == 0, err
    _, jobs = read(tmp_path)
    assert {job["id"]: job["request"] for job in jobs} == {
        f"refused-{number}": {**REFUSED, "user": f"user {number}"} for number in range(100)
    }
    assert {job["state"] for job in jobs} == {"failed"}


async def test_a_job_whose_reading_is_interrupted_is_recorded_as_it_is(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.submit(COUNT, model="m", id="a")
    await client.cancel("a")
    recorder, read, reading = Recorder(client), Recorder._read, asyncio.Event()

    async def never(*_: object) -> None:
        reading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Recorder, "_read", never)
    recording = asyncio.ensure_future(anext(recorder.record_known(["a"])))
    await reading.wait()
    recording.cancel()
    await asyncio.wait([recording])
    monkeypatch.setattr(Recorder, "_read", read)
    assert [(job.id, job.state) for job in await recorder.record_unfinished()] == [("a", "cancelled")]


async def test_a_job_of_another_tenant_is_not_counted_as_missed(client: Client) -> None:
    recorder, large = Recorder(client), _Followed("a", "m", "interactive", bytes(256_000_001), client)
    mine, other = (
        _Submitted(_Followed(tenant, "m", "interactive", b"{}", client), tenant) for tenant in ("acme", "other")
    )
    recorder._follow([_Submitted(large, "acme"), mine, other], Wanted("m", "acme"), 9)
    assert (recorder.following, recorder.skipped) == (1, 1)


async def test_of_jobs_that_do_not_fail_no_events_are_read_if_only_failed_ones_are_wanted(client: Client) -> None:
    await client.submit(COUNT, model="m", id="a")
    recorder = Recorder(client)
    recorder._followed["a"] = await recorder._find(client, "a")
    await client.cancel("a")
    calls = (await client.redis.info("commandstats")).get("cmdstat_lrange", {}).get("calls", 0)
    assert [job async for job in recorder._ended(failed_only=True)] == []
    assert recorder.following == 0
    assert (await client.redis.info("commandstats")).get("cmdstat_lrange", {}).get("calls", 0) == calls


@pytest.mark.usefixtures("alive")
def test_replay_reads_cut_files_and_old_files_and_says_what_else_a_file_is(sluice: Command, tmp_path: Path) -> None:
    file = tmp_path / "capture.jsonl"
    old = {"id": "a", "model": "default", "request": COUNT}
    line = json.dumps(old)
    file.write_text(f'{{"sluice_capture": 1}}\n{line}\n{json.dumps({**old, "id": "b", "later": [1]})}\n5\n{line[:-9]}')
    code, out, err = sluice("replay", "capture.jsonl")
    assert (code, [each.split()[:2] for each in out.splitlines()]) == (0, [["a", "equal:"], ["b", "equal:"]])
    assert "line 4 is no job of a capture" in err
    assert "line 5 is cut" in err
    for text, reason in {
        "": "it is not a capture",
        "\0\xff": "it is not a capture",
        '{"sluice_capture": true}\n': "it is not a capture",
        '{"sluice_capture": 2}\n': "update sluice",
        '{"sluice_capture": 1}\n': "no whole job",
        f'{{"sluice_capture": 1}}\n{line}\n': "--job 7: there is no such job; the file has 1 job: a",
        '{"sluice_capture": 1}\n{"id": "../a", "model": "default"}\n': "no whole job",
        '{"sluice_capture": 1}\n' + "[" * 100_000 + "\n": "no whole job",
    }.items():
        file.write_text(text, encoding="latin-1")
        code, _, err = sluice("replay", "capture.jsonl", "--job", "7")
        assert (code, reason in err) == (2, True), (text[:50], err)
    for text in ('[{"type": "delta", "token_ids": "x"}]', '[{"type": "finished"}]', '[{"type": 5}]'):
        file.write_text(f'{{"sluice_capture": 1}}\n{line[:-1]}, "events": {text}, "result": {{"choices": 3}}}}\n')
        code, out, err = sluice("replay", "capture.jsonl")
        assert (code, "a  skipped: its events or its result were changed" in out) == (2, True), (out, err)
    code, _, err = sluice("replay", ".")
    assert (code, "is not a file" in err) == (2, True)


@pytest.mark.usefixtures("alive")
def test_bodies_that_hold_no_request_are_kept_as_they_are(sluice: Command, tmp_path: Path) -> None:
    bodies = {
        "no-json": b"\x80\x04pickle",
        "deep": b'{"f":"chat","a":[{"messages":' + b"[" * 5000 + b"]" * 5000 + b'}],"k":{}}',
        "no-request": b'{"f":"chat","a":[],"k":{}}',
        "surrogate": b'{"f":"chat","a":[{"messages":[{"role":"user","content":"\\ud83d"}]}],"k":{}}',
    }
    with capturing(sluice, "--next", "4") as process:
        with sluice.db.pipeline(transaction=True) as pipe:
            for job_id, body in bodies.items():
                pipe.set(f"arq:job:{job_id}", body, ex=600)
                pipe.zadd("sluice:queue:default:interactive", {job_id: time.time() * 1000})
            pipe.publish("sluice:wake:default", "")
            pipe.execute()
        code, _, err = ended(process)
    assert code == 0, err
    _, jobs = read(tmp_path)
    found = {job["id"]: (job["state"], job["request"] is None, job["body"] != "") for job in jobs}
    assert found == {
        "no-json": ("failed", True, True),
        "deep": ("failed", True, True),
        "no-request": ("failed", True, True),
        "surrogate": ("failed", False, False),
    }
    code, out, _ = sluice("replay", "capture.jsonl")
    assert code == 0
    assert "surrogate  equal" in out
    assert out.count("skipped: its request") == 3


def test_capture_says_what_is_wrong_with_its_options(sluice: Command, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    for args, reason in {
        ("-o", "there"): "there exists already",
        ("-o", "no/folder/x"): "cannot write no/folder/x: No such file or directory",
        ("--next", "0"): "it must be at least 1",
        ("--next", "2", "--id", "a"): "--id: it names the jobs",
        ("--id", "../etc"): "a job id must match",
        ("--model", "a b"): "--model: 'a b' is not the name of a model",
    }.items():
        code, _, err = sluice("capture", *args)
        assert (code, reason in err) == (2, True), err
    assert (tmp_path / "there").read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir()] == ["there"]


@pytest.mark.usefixtures("admin")
def test_an_operator_may_capture_and_replay_jobs_of_a_worker_without_more_rights(
    sluice: Command, redis_url: str, tmp_path: Path
) -> None:
    sluice.env["SLUICE_REDIS_URL"] = url_of(redis_url, "operator")
    with WorkerProcess(url_of(redis_url, "worker"), model_name="own", max_rows=2):
        with capturing(sluice, "--model", "own", "--next", "2") as process:
            submit(sluice, COUNT, "greedy", "--model", "own", "--wait")
            submit(sluice, REFUSED, "refused", "--model", "own", "--wait")
            assert ended(process)[0] == 0
        assert [job["request"] for job in read(tmp_path)[1]] == [COUNT, REFUSED]
        assert sluice("replay", "capture.jsonl")[0] == 0


@pytest.mark.usefixtures("alive")
def test_a_gateway_answers_a_replay_too(sluice: Command, redis_url: str) -> None:
    with capturing(sluice, "--next", "3") as process:
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        submit(sluice, {**COUNT, "tenant": "acme", **streamed}, "greedy")
        submit(sluice, SAMPLED, "drawn")
        submit(sluice, CALLED, "called")
        assert ended(process)[0] == 0
    with GatewayProcess(redis_url) as gateway:
        code, out, err = sluice("replay", "capture.jsonl", "--url", gateway.base_url, "--json")
        assert (code, set(verdicts(out).values())) == (0, {"equal"}), (out, err)
    code, _, err = sluice("replay", "capture.jsonl", "--url", gateway.base_url)
    assert (code, "cannot be reached" in err) == (2, True)


@pytest.mark.slow
def test_images_vectors_and_counts_are_replayed(sluice: Command, redis_url: str, tmp_path: Path) -> None:
    seeing = write_seeing("qwen3_5", tmp_path / "seeing")
    part = {"type": "image_url", "image_url": {"url": data_url(saved(patch(3)))}}
    image = {**COUNT, "messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]}
    with WorkerProcess(redis_url, model=seeing, model_name="seeing", max_rows=2):
        with capturing(sluice, "--model", "seeing") as process:
            submit(sluice, {**image, "max_tokens": 8}, "image", "--model", "seeing")
            assert ended(process)[0] == 0
        code, out, err = sluice("replay", "capture.jsonl")
        assert (code, "image  equal: 8 tokens" in out) == (0, True), (out, err)
    vectors = write_embedding("bert", tmp_path / "vectors")
    (tmp_path / "capture.jsonl").unlink()
    with (
        WorkerProcess(redis_url, model=vectors, model_name="vectors"),
        capturing(sluice, "--model", "vectors") as process,
    ):
        body = {"t": None, "f": "embed", "a": [{"input": ["Hello there!", "b"]}], "k": {}, "et": 1}
        sluice.db.set("arq:job:embedded", json.dumps(body), ex=600)
        sluice.db.zadd("sluice:queue:vectors:interactive", {"embedded": time.time() * 1000})
        sluice.db.publish("sluice:wake:vectors", "")
        assert ended(process)[0] == 0
        code, out, err = sluice("replay", "capture.jsonl")
        assert (code, out) == (0, "embedded  equal: 2 vectors, finished (stop)\n"), err


def test_a_capture_of_a_model_whose_server_is_away_ends_at_once(
    sluice: Command, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "servers.toml").write_text(f'default = "{redis_url}"\n[models]\nother = "redis://127.0.0.1:1/0"\n')
    sluice.env["SLUICE_REDIS_URLS"] = str(tmp_path / "servers.toml")
    code, _, err = sluice.process("capture", "--model", "other")
    assert (code, "Connect call failed" in err, [*tmp_path.glob("*.jsonl")]) == (2, True, []), err


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[Command]:
    """Commands with a map of two servers: on one a worker for chats, on the other one for vectors."""
    vectors = write_embedding("bert", tmp_path / "model")
    with Server() as first, Server() as second:
        file = tmp_path / "servers.toml"
        file.write_text(f'default = "{first.url}"\n[models]\nvectors = "{second.url}"\n')
        with (
            WorkerProcess(first.url, model_name="talks", max_rows=2),
            WorkerProcess(second.url, model=vectors, model_name="vectors"),
        ):
            command = Command(first.url, tmp_path)
            command.env |= {"SLUICE_REDIS_URLS": str(file), "SLUICE_REDIS_URL": "redis://127.0.0.1:1/0"}
            yield command
            command.db.close()


@pytest.mark.slow
def test_counts_and_vectors_of_several_servers_are_recorded_and_replayed(spread: Command, tmp_path: Path) -> None:
    texts: dict[str, Any] = {"input": ["Hello there!", "b"]}
    asked = {
        "talks": [("chat", "chat", COUNT), ("count", "count", COUNT), ("refused", "count", REFUSED)],
        "vectors": [
            ("floats", "embed", texts),
            ("base64", "embed", {**texts, "encoding_format": "base64", "dimensions": 8}),
            ("no-text", "embed", {"input": []}),
        ],
    }

    async def ask(jobs: list[tuple[str, JobFunction, dict[str, Any]]], model: str) -> None:
        async with MappedClient(tmp_path / "servers.toml") as client:
            for job_id, function, request in jobs:
                await client.submit({**request, "model": model}, model=model, id=job_id, function=function)

    for model, jobs in asked.items():
        with capturing(spread, "--model", model, "--next", "3", "-o", f"{model}.jsonl") as process:
            asyncio.run(ask(jobs, model))  # type: ignore[arg-type]
            code, _, err = ended(process)
        assert code == 0, err
    lines = [(tmp_path / f"{model}.jsonl").read_text().splitlines() for model in asked]
    (tmp_path / "all.jsonl").write_text("\n".join((*lines[0], *lines[1][1:], "")))
    code, out, err = spread("replay", "all.jsonl", "--json")
    assert (code, verdicts(out)) == (0, dict.fromkeys([id for jobs in asked.values() for id, *_ in jobs], "equal")), (
        out, err,
    )  # fmt: skip
    for job in (jobs := [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()])[1:]:
        assert job["request"]["model"] == job["model"]
        if job["id"] == "count":
            job["result"]["usage"]["prompt_tokens"] += 1
        if job["id"] == "floats":
            job["result"]["data"][1]["embedding"][2] += 0.5
    (tmp_path / "changed.jsonl").write_text("\n".join(map(json.dumps, jobs)))
    code, out, _ = spread("replay", "changed.jsonl", "--job", "count", "--job", "floats")
    assert code == 1
    assert re.fullmatch(
        r"count  differs: recorded 15 prompt tokens, now 14\nfloats  differs: vector 1 differs at number 2: .*\n", out
    ), out
    with GatewayProcess(spread.env["SLUICE_REDIS_URL"], more_env=spread.env) as gateway:
        del spread.env["SLUICE_REDIS_URL"], spread.env["SLUICE_REDIS_URLS"]
        code, out, _ = spread("replay", "all.jsonl", "--url", gateway.base_url, "--json")
    counts = dict.fromkeys(("count", "refused"), "skipped")  # a gateway has no path for them
    assert (code, verdicts(out)) == (0, {job["id"]: "equal" for job in jobs[1:]} | counts)
