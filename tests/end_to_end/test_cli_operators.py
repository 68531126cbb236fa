"""The command for operators: live workers, dead letters, and full queues."""

import json
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sluice.presence import HOST
from tests.end_to_end.test_cli import Command, last_line
from tests.support.chaos.harness import chat_request
from tests.support.stack import Server, WorkerProcess
from worker import __version__

HOUR_S = 3600
_TIMEOUT_S = 120
_ERROR = {"type": "internal", "message": "Workers died 3 times.", "retryable": False}


@pytest.fixture(scope="module")
def narrow_worker(worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """Another worker on the server of `worker`."""
    with paced(worker.url, "narrow", max_rows=1, queue_limit=1) as process:
        yield process


@pytest.fixture
def narrow(narrow_worker: WorkerProcess, sluice: Command) -> Iterator[str]:
    """A model whose only row is taken, and whose queue is limited to that job."""
    narrow_worker.wait_ready()
    sluice("submit", "--file", "-", "--id", "busy", "--model", "narrow", stdin=json.dumps(chat_request(100_000)))
    sluice.wait_until_running("busy")
    deadline = time.monotonic() + _TIMEOUT_S
    while sluice.db.hget(f"sluice:worker:{narrow_worker.name}", "rows") != "1":
        assert time.monotonic() < deadline, "the worker does not publish that its row is taken"
        time.sleep(0.01)
    yield "narrow"
    sluice("cancel", "busy")


def paced(url: str, model_name: str, *, max_rows: int = 4, queue_limit: int = 100, **more: object) -> WorkerProcess:
    return WorkerProcess(
        url,
        model="paced",
        module="tests.support.chaos.paced",
        model_name=model_name,
        lease_s=1,
        max_rows=max_rows,
        reserved_rows=0,
        queue_limit=queue_limit,
        **more,
    )


def park(sluice: Command, job_id: str, **changed: Any) -> None:
    """Store a dead letter as a worker does. `request`: the request in its body."""
    request = changed.pop("request", chat_request(3, "Hello!"))
    letter = {
        "id": job_id,
        "model": "nobody",
        "lane": "interactive",
        "crashes": 3,
        "parked_at": time.time(),
        "error": _ERROR,
        "body": json.dumps({"t": None, "f": "chat", "a": [request], "k": {}, "et": 1}),
    }
    sluice.db.hset("sluice:dead", job_id, json.dumps({**letter, **changed}))


def parked(sluice: Command) -> list[str]:
    return sluice.db.hkeys("sluice:dead")  # type: ignore[return-value]


def table(out: str, title: str) -> list[list[str]]:
    """Return the cells of a table by row."""
    _, found, rest = out.partition(title)
    assert found, out
    lines = rest.partition("└")[0].splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def put_off(sluice: Command, lane: str, count: int) -> None:
    """Queue jobs for an hour from now, which no worker claims yet."""
    due_ms = (time.time() + HOUR_S) * 1000
    sluice.db.zadd(f"sluice:queue:default:{lane}", {f"later-{k}": due_ms for k in range(count)})


# Workers


def test_workers_are_shown_with_their_rows_and_the_jobs_of_each_lane(sluice: Command, alive: WorkerProcess) -> None:
    put_off(sluice, "interactive", 2)
    put_off(sluice, "batch", 1200)
    code, out, err = sluice("workers")
    ((*fields, rate, speed, load, paused, up_for, version),) = table(out, "Workers")
    assert (code, fields, paused, err) == (0, [alive.name, "default", "running", "0 / 16", "14"], "no", "")
    assert (re.fullmatch(r"\d+\.\d\d", rate) is not None, version) == (True, __version__)
    assert re.fullmatch(r"[\d,]+ \d+%", f"{speed} {load}")
    assert re.fullmatch(r"\d+ (s|min)( \d+ s)?", up_for)
    assert table(out, "Jobs queued and running") == [["default", "2", "1,200"]]


def test_workers_as_json_are_one_object_a_line_with_numbers(sluice: Command, alive: WorkerProcess) -> None:
    put_off(sluice, "batch", 3)
    code, out, err = sluice("workers", "--json")
    (line,) = out.splitlines()
    said = json.loads(line)
    assert 0 <= time.time() - said.pop("started_at") < HOUR_S
    assert said.pop("jobs_per_s") >= 0  # other tests' jobs may have ended in the last minute
    assert (said.pop("tokens_per_s") >= 0, 0 <= said.pop("load") <= 1) == (True, True)
    host = {name: said.pop(name) for name in (*HOST, "step_share", "offline_step_share")}
    assert None not in host.values()
    assert host["step_share"] == 1
    assert (code, err, said) == (0, "", {
        "name": alive.name,
        "model": "default",
        "state": "running",
        "rows": 0,
        "max_rows": 16,
        "offline_rows": 14,
        "queue_limit": 10_000,
        "images": False,
        "version": __version__,
        "protocol": 1,
        "queued": {"interactive": 0, "batch": 3},
    })  # fmt: skip


def test_workers_of_two_models_are_sorted_by_model(sluice: Command, alive: WorkerProcess, narrow: str) -> None:
    _, out, _ = sluice("workers")
    shown = [row[1:4] for row in table(out, "Workers")]
    assert shown == [["default", "running", "0 / 16"], [narrow, "running", "1 / 1"]]
    assert table(out, "Jobs queued and running") == [["default", "0", "0"], [narrow, "1", "0"]]


def test_a_worker_that_ends_its_jobs_is_shown_as_draining(sluice: Command, alive: WorkerProcess) -> None:
    with paced(alive.url, "leaving", max_rows=1) as process:
        sluice("submit", "--file", "-", "--id", "last", "--model", "leaving", stdin=json.dumps(chat_request(100_000)))
        sluice.wait_until_running("last")
        process.signal(signal.SIGTERM)
        deadline = time.monotonic() + _TIMEOUT_S
        while sluice.db.hget(f"sluice:worker:{process.name}", "state") != "draining":
            assert time.monotonic() < deadline, process.log()
            time.sleep(0.01)
        _, out, err = sluice("workers")
        assert [row[2] for row in table(out, "Workers") if row[1] == "leaving"] == ["draining"]
        assert "leaving" in err, "its queue has no worker"
        sluice("cancel", "last")
        assert process.wait() == 0


@pytest.mark.parametrize("how", [(), ("--json",)])
def test_no_worker_is_a_sentence_with_the_way_out_and_exit_code_1(sluice: Command, how: tuple[str, ...]) -> None:
    with Server() as empty:
        code, out, err = sluice("workers", *how, "--redis-url", empty.url)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "Start one: sluice worker --model" in err


def test_a_drained_worker_ends_its_jobs_takes_no_more_and_leaves(sluice: Command, alive: WorkerProcess) -> None:
    with paced(alive.url, "leaving", grace_s=60) as process:
        sluice("submit", "--file", "-", "--id", "last", "--model", "leaving", stdin=json.dumps(chat_request(100)))
        sluice.wait_until_running("last")
        code, out, err = sluice("workers", "drain", process.name)
        assert (code, out, err.splitlines()[-1]) == (0, "", f"{process.name}: has left")
        assert f"{process.name}: drains, rows left: 1" in err
        assert (process.wait(), sluice.db.hmget("sluice:job:last", "state", "attempt")) == (0, ["finished", "1"])
    assert sluice.db.hget(f"sluice:worker:{alive.name}", "state") == "running"


def test_asking_without_waiting_returns_at_once(sluice: Command, alive: WorkerProcess) -> None:
    with paced(alive.url, "leaving") as process:
        code, out, err = sluice("workers", "drain", process.name, "--no-wait")
        assert (code, out, err) == (0, "", f"asked to drain: {process.name}\n")
        assert process.wait() == 0


def test_workers_restart_one_after_the_other(sluice: Command, alive: WorkerProcess) -> None:
    with paced(alive.url, "many", name="m-1") as one, paced(alive.url, "many", name="m-2") as two:
        before = [sluice.db.hget(f"sluice:worker:{each.name}", "started_at") for each in (one, two)]
        code, out, err = sluice("workers", "restart", "m-1", "m-2")
        assert (code, out, err.splitlines()[-1].endswith("is back")) == (0, "", True)
        assert {line for line in err.splitlines() if "is back" in line} == {"m-1: is back", "m-2: is back"}
        assert sum("waits for its turn" in line for line in err.splitlines()) >= 1
        after = [sluice.db.hget(f"sluice:worker:{each.name}", "started_at") for each in (one, two)]
        assert all(was != now for was, now in zip(before, after, strict=True))
        pids = [sluice.db.hget(f"sluice:worker:{each.name}", "pid") for each in (one, two)]
        assert pids == [str(one.pid), str(two.pid)], "a service manager that started them still has them"
        assert not sluice.db.exists("sluice:restart:many")


def test_a_worker_after_one_that_did_not_come_back_is_left_as_it_is(
    sluice: Command, narrow_worker: WorkerProcess
) -> None:
    narrow_worker.wait_ready()
    before = sluice.db.hget(f"sluice:worker:{narrow_worker.name}", "started_at")
    sluice.db.set("sluice:restart:narrow", "ghost", px=1500)
    code, out, err = sluice("workers", "restart", narrow_worker.name)
    assert (code, out, err.splitlines()[0]) == (1, "", f"{narrow_worker.name}: waits for its turn")
    assert f"{narrow_worker.name} will not restart" in err
    assert sluice.db.hget(f"sluice:worker:{narrow_worker.name}", "started_at") == before


def test_following_ends_if_nothing_changes(sluice: Command, alive: WorkerProcess) -> None:
    with paced(alive.url, "many") as process:
        sluice.db.set("sluice:restart:many", "ghost", ex=60)
        code, _, err = sluice("workers", "restart", process.name, "--timeout", "1")
        assert (code, "nothing has changed for 1 s" in err) == (1, True)


@pytest.mark.parametrize("what", ["drain", "restart"])
def test_an_unknown_worker_is_refused_with_those_there_are(sluice: Command, alive: WorkerProcess, what: str) -> None:
    code, out, err = sluice("workers", what, "nobody", alive.name)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert ("'nobody'" in err, alive.name in err) == (True, True)
    assert sluice.db.hget(f"sluice:worker:{alive.name}", "asked") is None


def test_a_worker_of_an_earlier_version_is_not_asked(sluice: Command, alive: WorkerProcess) -> None:
    sluice.db.hset("sluice:worker:old", mapping={"name": "old", "model": "m", "started_at": "1"})
    code, _, err = sluice("workers", "drain", "old")
    assert (code, "SIGTERM" in err, sluice.db.hget("sluice:worker:old", "asked")) == (2, True, None)


def test_an_option_in_front_of_the_command_is_refused_instead_of_ignored(sluice: Command, alive: WorkerProcess) -> None:
    code, _, err = sluice("workers", "--redis-url", "redis://elsewhere", "drain", alive.name)
    assert (code, "--redis-url: it must follow the command" in err) == (2, True)


# Dead letters


@pytest.mark.parametrize("how", [(), ("--json",)])
def test_no_dead_letter_is_a_sentence_and_no_failure(sluice: Command, how: tuple[str, ...]) -> None:
    code, out, err = sluice("dead", "list", *how)
    assert (code, out, err.startswith("there are no dead letters")) == (0, "", True)


def test_dead_letters_are_listed_oldest_first_and_an_id_is_never_cut(sluice: Command) -> None:
    park(sluice, "young", lane="batch", parked_at=time.time() - 65)
    park(sluice, "x" * 128, model="tiny", crashes=4, parked_at=time.time() - 2 * HOUR_S)
    code, out, err = sluice("dead", "list")
    *rows, (*last, ago) = table(out, "Dead letters")
    assert rows[0][:4] == ["x" * 128, "tiny", "interactive", "4"]
    assert (code, last, ago.startswith("1 min "), err) == (0, ["young", "nobody", "batch", "3"], True, "")


def test_dead_letters_as_json_are_one_object_a_line_without_the_request(sluice: Command) -> None:
    park(sluice, "a", parked_at=1.5)
    park(sluice, "b", parked_at=0.5)
    code, out, err = sluice("dead", "list", "--json")
    common = {"model": "nobody", "lane": "interactive", "crashes": 3, "error": _ERROR}
    expected = [{"id": "b", "parked_at": 0.5, **common}, {"id": "a", "parked_at": 1.5, **common}]
    assert (code, [json.loads(line) for line in out.splitlines()], err) == (0, expected, "")


def test_a_letter_s_request_goes_to_stdout_and_its_story_to_stderr(sluice: Command) -> None:
    park(sluice, "a", request=chat_request(3, "🚀 Grüße"), parked_at=time.time() - 65)
    code, out, err = sluice("dead", "show", "a")
    assert (code, json.loads(out), "🚀 Grüße" in out) == (0, chat_request(3, "🚀 Grüße"), True)
    when, where, why = err.splitlines()
    assert re.fullmatch(r"parked 1 min \d+ s ago \(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+\) after 3 crashes", when)
    assert (where, why) == ("model nobody, lane interactive", "internal: Workers died 3 times.")


def test_a_dead_request_cannot_steer_the_terminal(sluice: Command) -> None:
    hostile = chat_request(3, "\x1b[2J\x9b2J\x7f\ud800")
    park(sluice, "a", request=hostile, model="\x1b[2J")
    _, out, err = sluice("dead", "show", "a")
    assert (json.loads(out), "\\u001b[2J\\u009b2J\\u007f\\ud800" in out, "\x1b" in err) == (hostile, True, False)
    assert "\x1b" not in sluice("dead", "list")[1]


def test_a_shown_request_can_be_submitted_as_a_file(sluice: Command) -> None:
    park(sluice, "a")
    _, request, _ = sluice("dead", "show", "a")
    assert sluice("submit", "--file", "-", "--model", "nobody", stdin=request)[0] == 0
    assert sluice.db.zcard("sluice:queue:nobody:interactive") == 1


def test_a_dropped_letter_is_gone_and_the_others_stay(sluice: Command) -> None:
    park(sluice, "a")
    park(sluice, "b")
    assert sluice("dead", "drop", "a") == (0, "", "a is dropped\n")
    assert parked(sluice) == ["b"]


@pytest.mark.parametrize("what", ["show", "retry", "drop"])
def test_an_unknown_letter_is_a_sentence_and_exit_code_2(sluice: Command, what: str) -> None:
    park(sluice, "a")
    code, out, err = sluice("dead", what, "nope")
    assert (code, out, len(err.splitlines()), parked(sluice)) == (2, "", 1, ["a"])
    assert err.startswith("sluice: there is no dead letter 'nope'. Check the id")


@pytest.mark.parametrize("what", ["show", "retry"])
def test_a_letter_whose_body_had_expired_can_only_be_dropped(sluice: Command, what: str) -> None:
    park(sluice, "a", body="")
    code, out, err = sluice("dead", what, "a")
    assert (code, out, parked(sluice)) == (2, "", ["a"])
    assert last_line(err).endswith("sluice dead drop a")


def supervise(worker: WorkerProcess, sluice: Command, job_id: str) -> None:
    """Restart the worker each time it dies, until the job has ended."""
    deadline = time.monotonic() + _TIMEOUT_S
    while sluice.db.hget(f"sluice:job:{job_id}", "state") != "failed":
        assert time.monotonic() < deadline, worker.log()
        if worker.process is not None and worker.process.poll() is not None:
            worker.start(wait=False)
        time.sleep(0.02)


def test_a_job_that_kills_its_workers_is_listed_and_a_retry_queues_it_under_a_new_id(
    redis_url: str, sluice: Command
) -> None:
    poison = chat_request(5, "poison 3")
    with paced(redis_url, "mortal") as worker:
        sluice("submit", "--file", "-", "--id", "deadly", "--model", "mortal", stdin=json.dumps(poison))
        supervise(worker, sluice, "deadly")
    ((id, model, lane, crashes, _),) = table(sluice("dead", "list")[1], "Dead letters")
    assert (id, model, lane, crashes) == ("deadly", "mortal", "interactive", "3")
    assert json.loads(sluice("dead", "show", "deadly")[1]) == poison
    code, out, err = sluice("dead", "retry", "deadly")
    new_id = out.strip()
    assert (code, new_id == "deadly", parked(sluice)) == (0, False, [])
    assert err.startswith("no worker serves 'mortal'")
    assert last_line(err).endswith(f"sluice tail {new_id}")
    assert sluice.db.zrange("sluice:queue:mortal:interactive", 0, -1) == [new_id]
    assert json.loads(str(sluice.db.get(f"arq:job:{new_id}")))["a"] == [poison]


# A full queue


def full(said: tuple[int, str, str]) -> bool:
    """Return True if the command failed with one message, on stderr, that has the seconds to wait."""
    code, out, err = said
    sentence = r"sluice: the queue is full \(length 1, limit 1\), and nothing was queued\. Try again in [1-9]\d* s\.\n"
    return (code, out, re.fullmatch(sentence, err) is not None) == (4, "", True)


@pytest.mark.parametrize(
    "args", [("submit", "Hello!"), ("submit", "Hello!", "--json"), ("submit", "Hello!", "--wait"), ("chat", "Hello!")]
)
def test_a_full_queue_is_a_sentence_with_the_seconds_to_wait_and_exit_code_4(
    sluice: Command, narrow: str, args: tuple[str, ...]
) -> None:
    assert full(sluice(*args, "--model", narrow))
    assert sluice.db.zrange("sluice:queue:narrow:interactive", 0, -1) == ["busy"]


def test_a_retry_into_a_full_queue_keeps_the_letter(sluice: Command, narrow: str) -> None:
    park(sluice, "a", model=narrow)
    assert full(sluice("dead", "retry", "a"))
    assert parked(sluice) == ["a"]


# Help


@pytest.mark.parametrize(
    "command",
    ["workers", "workers drain", "workers restart", "dead", "dead list", "dead show", "dead retry", "dead drop"],
)
def test_help_teaches_with_an_example_and_needs_no_worker(sluice: Command, command: str) -> None:
    code, out = sluice.help(*command.split())
    example = command if command != "dead" else "dead list"
    assert (code, f"    sluice {example}" in out) == (0, True)


@pytest.mark.parametrize("command", ["", "chat", "submit", "dead retry"])
def test_help_names_the_exit_code_of_a_full_queue(sluice: Command, command: str) -> None:
    out = " ".join(sluice(*command.split(), "--help")[1].split())
    assert re.search(r"\b4:? (if )?the queue is full", out)
