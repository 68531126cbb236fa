"""`sluice top` shows what workers publish and what waits, at any width, among foreign values, and through outages."""

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from sluice.presence import NUMBERS
from tests.end_to_end.test_cli import Command, Terminal
from tests.support.chaos.harness import chat_request
from tests.support.stack import Server, WorkerProcess

LOAD = {
    "tokens_per_s": "412.5", "ttft_p50_ms": "240.0", "ttft_p95_ms": "1900.0", "gap_p50_ms": "8.5", "gap_p95_ms": "21.0",
    "prefix_hit_rate": "0.873", "prefix_cache_bytes": "4200000000", "memory_bytes": "812000000",
    "claims_left": "12", "claims_overruled": "3", "prefix_hint_rate": "0.95",
    "memory_limit_bytes": "24000000000", "jobs_per_s": "0.75", "offline_rows": "14", "version": "0.1.0",
}  # fmt: skip
PRESSED = {"memory_pressure": "warning", "memory_reclaim": "caches", "machine": "hot", "offline_step_share": "0.25"}
FOREIGN = ("9" * 5000, "nan", "-1", "1e999", "\x1b[2J", "", "1_000", "٣")


def put_worker(db: redis.Redis, name: str, model: str = "default", **fields: str) -> None:
    known = {"name": name, "model": model, "state": "running", "rows": "3", "max_rows": "16", **LOAD, **fields}
    db.hset(f"sluice:worker:{name}", mapping=known)


def put_jobs(db: redis.Redis, model: str, lane: str, count: int, *, tenant: str, age_s: float, state: str) -> None:
    now = time.time()
    for k in range(count):
        id = f"{model}-{lane}-{tenant}-{state}-{k}"
        db.hset(f"sluice:job:{id}", mapping={"state": state, **({"tenant": tenant} if tenant else {})})
        db.zadd(f"sluice:queue:{model}:{lane}", {id: (now - age_s) * 1000 + k})


def put_run(db: redis.Redis, id: str, **changed: object) -> None:
    run = {
        "id": id, "object": "batch", "endpoint": "/v1/chat/completions", "input_file_id": "in.jsonl",
        "completion_window": "24h", "status": "in_progress", "created_at": 1,
        "request_counts": {"total": 200, "completed": 50, "failed": 2}, **changed,
    }  # fmt: skip
    db.set(f"sluice:batch:{id}", json.dumps(run), ex=7 * 86_400)


@pytest.fixture
def busy(sluice: Command) -> Command:
    put_worker(sluice.db, "mac-studio-3.office.example", "qwen3-30b-a3b-instruct-4bit")
    put_worker(sluice.db, "ada", state="draining", images="yes", load="0.5", protocol="1", queue_limit="100", **PRESSED)
    put_jobs(sluice.db, "default", "interactive", 2, tenant="shop", age_s=75, state="running")
    put_jobs(sluice.db, "default", "interactive", 3, tenant="shop", age_s=70, state="queued")
    put_jobs(sluice.db, "default", "interactive", 1, tenant="", age_s=2, state="queued")
    put_run(sluice.db, "batch_night")
    put_run(sluice.db, "batch_over", status="completed")
    return sluice


@pytest.mark.parametrize("width", [80, 120])
def test_every_number_is_readable_at_the_width(busy: Command, width: int) -> None:
    busy.env["COLUMNS"] = str(width)
    code, out, err = busy("top", "--once")
    lines = [line.rstrip() for line in out.splitlines()]
    assert (code, err, max(map(len, lines)) <= width) == (0, "", True), out
    assert "2 workers · 6 of 32 rows · 825 tokens/s" in lines[0]
    name = "mac-studio-3.office.example" if width == 120 else r"mac-stu\S*…"
    more = {80: "", 120: r" +0\.75"}[width]
    numbers = rf" running +3/16 +412{more} +0\.2/1\.9 +8\.5/21 +87% +812M/24G"
    assert re.search(rf"^{name} +qwen3-\S+{numbers}", out, re.MULTILINE), out
    assert re.search(r"^ada +default +draining +3/16", out, re.MULTILINE), out
    assert re.search(r"^default +0 +3/16 +412 +12/3 +95% +4 wait +1m1\ds +– *$", out, re.MULTILINE), out
    assert re.search(r"^shop +default +interactive +3 +1m1\ds", out, re.MULTILINE), out
    assert re.search(r"^– +default +interactive +1 +\ds", out, re.MULTILINE), out
    assert re.search(r"^batch_night +in_progress +52/200 +2", out, re.MULTILINE), out
    assert "batch_over" not in out


def test_json_is_one_object_with_the_fields_that_the_help_names(busy: Command) -> None:
    code, out, err = busy("top", "--once", "--json")
    (line,) = out.splitlines()
    said = json.loads(line)
    assert (code, err) == (0, "")
    assert said["workers"][0] == {
        "name": "ada", "model": "default", "version": "0.1.0", "state": "draining", "rows": 3, "max_rows": 16,
        "offline_rows": 14, "jobs_per_s": 0.75, "tokens_per_s": 412.5, "ttft_p50_ms": 240.0, "ttft_p95_ms": 1900.0,
        "gap_p50_ms": 8.5, "gap_p95_ms": 21.0, "prefix_hit_rate": 0.873, "prefix_cache_bytes": 4_200_000_000,
        "claims_left": 12, "claims_overruled": 3, "prefix_hint_rate": 0.95,
        "memory_bytes": 812_000_000, "memory_limit_bytes": 24_000_000_000, "started_at": None,
        "images": True, "load": 0.5, "protocol": 1, "queue_limit": 100, "step_share": None, "offline_step_share": 0.25,
        "memory_pressure": "warning", "memory_reclaim": "caches", "machine": "hot",
    }  # fmt: skip
    assert said["models"][0] == {
        "model": "default", "workers": 0, "loading": None, "rows": 3, "max_rows": 16, "tokens_per_s": 412.5,
        "claims_left": 12, "claims_overruled": 3,
    }  # fmt: skip
    (queue,) = said["queues"]
    assert 70 <= queue.pop("oldest_s") < 80
    assert queue == {
        "model": "default", "lane": "interactive", "jobs": 6, "running": 2, "waiting": 4, "complete": True
    }  # fmt: skip
    assert [(each["tenant"], each["waiting"]) for each in said["tenants"]] == [("shop", 3), ("", 1)]
    assert said["runs"] == [
        {"id": "batch_night", "status": "in_progress", "total": 200, "completed": 50, "failed": 2, "paused": False}
    ]
    _, help = busy.help("top")
    named = {name for part in said.values() if isinstance(part, list) for each in part for name in each}
    assert [name for name in {*said, *named} if not re.search(rf"\b{name}\b", help)] == []


@pytest.mark.parametrize("value", FOREIGN)
def test_a_number_that_no_worker_wrote_is_absent(sluice: Command, value: str) -> None:
    put_worker(sluice.db, "eve", **dict.fromkeys([*LOAD, *NUMBERS], value))
    code, out, err = sluice("top", "--once", "--json")
    (worker,) = json.loads(out)["workers"]
    assert (code, err, {worker[name] for name in NUMBERS}) == (0, "", {None})
    code, out, err = sluice("top", "--once")
    assert (code, err, "\x1b" in out, max(map(len, out.splitlines())) <= 80) == (0, "", False, True), out


def test_foreign_values_in_all_keys_are_skipped(busy: Command) -> None:
    before = json.loads(busy("top", "--once", "--json")[1])
    db = busy.db
    db.set("sluice:worker:text", "x")
    db.hset("sluice:worker:other", "a", "b")
    put_worker(db, "bad", "no such name!")
    db.set("sluice:queue:foreign:batch", "x")
    db.zadd("sluice:queue:no-lane", {"a": 1})
    db.hset("sluice:batch:hash", "a", "b")
    for i, text in enumerate(["{", "[]", "3", "[" * 100_000, '{"id": 1}', '{"request_counts": {"total": []}}', "\xff"]):
        db.set(f"sluice:batch:foreign-{i}", text)
    put_run(db, "batch_bad", request_counts={"total": "many", "completed": None, "failed": {}})
    put_run(db, "batch_worse", created_at="yesterday")
    db.set("sluice:job:default-interactive-shop-queued-1", "a foreign value in place of a job")
    after = json.loads(busy("top", "--once", "--json")[1])
    assert [sorted(after[part][0]) for part in ("workers", "queues", "runs")] == [
        sorted(before[part][0]) for part in ("workers", "queues", "runs")
    ]
    assert [each["name"] for each in after["workers"]] == [each["name"] for each in before["workers"]]
    assert [each["id"] for each in after["runs"]] == ["batch_night"]
    assert [(each["tenant"], each["waiting"]) for each in after["tenants"]] == [("shop", 2), ("", 2)]
    assert busy("top", "--once")[0] == 0
    assert busy("batch", "list")[0] == 0


def test_scores_and_tenants_that_no_client_wrote_are_bounded(sluice: Command) -> None:
    sluice.db.zadd("sluice:queue:default:batch", {"a": "-inf", "b": "inf", "c": 5e300})
    sluice.db.hset("sluice:job:a", "tenant", "\x1b[31m\n" + "x" * 10_000)
    code, out, _ = sluice("top", "--once", "--json")
    said = json.loads(out)
    assert (code, said["queues"][0]["jobs"], said["queues"][0]["waiting"]) == (0, 3, 1)
    assert (said["tenants"][0]["oldest_s"], len(said["tenants"][0]["tenant"])) == (1e12, 128)
    code, out, _ = sluice("top", "--once")
    assert (code, "\x1b" in out, max(map(len, out.splitlines())) <= 80) == (0, False, True), out


def test_only_the_oldest_jobs_of_a_long_queue_are_read(sluice: Command) -> None:
    sluice.db.zadd("sluice:queue:default:batch", {f"job-{k}": k for k in range(5000)})
    sluice.db.config_resetstat()
    said = json.loads(sluice("top", "--once", "--json")[1])
    (queue,) = said["queues"]
    assert (queue["jobs"], queue["waiting"], queue["complete"]) == (5000, 300, False)
    commands: Any = sluice.db.info("commandstats")
    assert commands["cmdstat_hget"]["calls"] == 600
    assert "300+ wait" in sluice("top", "--once")[1]


def test_without_workers_it_says_how_to_start_one(sluice: Command) -> None:
    code, out, _ = sluice("top", "--once")
    assert (code, "No worker is alive. Start one: sluice worker --model FOLDER_OR_HUB_ID" in out) == (0, True)


def test_without_a_terminal_it_prints_one_sample(busy: Command) -> None:
    tables = [busy("top", *args)[1].partition("\n")[2] for args in ((), ("--once",))]
    piped, once = (re.sub(r"\ds\b", "", table) for table in tables)  # a second may pass in between
    assert piped == once


@pytest.mark.parametrize(
    ("value", "said"),
    [("0", "at least 0.2, not 0.0."), ("nan", "a number, not 'nan'."), ("inf", "a number, not 'inf'.")],
)
def test_a_pause_that_nobody_can_wait_for_is_refused(sluice: Command, value: str, said: str) -> None:
    code, _, err = sluice("top", "--every", value)
    assert (code, f"it must be {said}" in " ".join(err.split())) == (2, True), err


def test_once_without_a_server_is_a_sentence(tmp_path: Path) -> None:
    code, out, err = Command("redis://127.0.0.1:1/0", tmp_path)("top", "--once")
    assert (code, out) == (2, "")
    assert err.startswith("sluice: no server answers at redis://127.0.0.1:1/0:")


def test_json_goes_on_until_ctrl_c(busy: Command) -> None:
    with busy.running("top", "--json", "--every", "0.2") as process:
        assert process.stdout is not None
        samples = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert samples[0]["at"] < samples[1]["at"] < samples[2]["at"]


@pytest.fixture
def own_server() -> Iterator[Server]:
    server = Server().start()
    try:
        yield server
    finally:
        server.stop()


def test_it_lives_through_an_outage_and_leaves_the_terminal_as_it_was(own_server: Server, tmp_path: Path) -> None:
    with closing(Terminal(own_server.url, tmp_path, "top", "--every", "0.2")) as terminal:
        begun = terminal.until("No worker is alive")
        assert ("\x1b[?1049h" in begun, "\x1b[?25l" in begun) == (True, True), "another screen, without a cursor"
        own_server.kill()
        terminal.until("no server answers")
        terminal.until("Trying again.")
        own_server.start()
        with redis.Redis.from_url(own_server.url) as db:
            put_worker(db, "ada")
        terminal.until("412")
        terminal.type("\x03")
        ended = terminal.until("\x1b[?1049l")
        assert "\x1b[?25h" in ended, "the cursor is back"
        assert terminal.process.wait(20) == 0


def test_a_signal_to_end_leaves_the_terminal_as_it_was(own_server: Server, tmp_path: Path) -> None:
    with closing(Terminal(own_server.url, tmp_path, "top")) as terminal:
        terminal.until("No worker is alive")
        terminal.process.send_signal(signal.SIGTERM)
        ended = terminal.until("\x1b[?1049l")
        assert ("\x1b[?25h" in ended, terminal.process.wait(20)) == (True, 128 + signal.SIGTERM)


def test_json_goes_on_after_an_outage_and_says_on_stderr_why_it_paused(own_server: Server, tmp_path: Path) -> None:
    with Command(own_server.url, tmp_path).running("top", "--json", "--every", "0.2") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        before = json.loads(process.stdout.readline())
        own_server.kill()
        assert process.stderr.readline().startswith("sluice: no server answers at")
        own_server.start()
        while json.loads(process.stdout.readline())["at"] < before["at"] + 0.5:
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_real_worker_publishes_its_load(sluice: Command, alive: WorkerProcess) -> None:
    request = json.dumps(chat_request(200))
    for k in range(2):
        assert sluice("submit", "--file", "-", "--id", f"load-{k}", "--wait", stdin=request)[0] == 0
    deadline = time.monotonic() + 30
    while True:
        (worker,) = json.loads(sluice("top", "--once", "--json")[1])["workers"]
        if worker["tokens_per_s"] and worker["gap_p50_ms"]:
            break
        assert time.monotonic() < deadline, worker
        time.sleep(0.1)
    assert (worker["name"], worker["state"]) == (alive.name, "running")
    assert 0 < worker["gap_p50_ms"] <= worker["gap_p95_ms"]
    assert 0 < worker["ttft_p50_ms"] <= worker["ttft_p95_ms"]
    assert 0 <= worker["memory_bytes"] < worker["memory_limit_bytes"]
    assert worker["memory_pressure"] in ("normal", "warning", "critical")  # as this machine says
    assert (worker["step_share"], worker["offline_step_share"]) == (1, 1)
