"""Queues without a worker are listed, refused on request, cancelled and purged."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.test_cli import Command, Terminal
from tests.end_to_end.test_cli_operators import table
from tests.support.stack import WorkerProcess


def queue_jobs(sluice: Command, model: str, count: int, lane: str = "interactive", *, prefix: str = "job") -> None:
    for k in range(count):
        sluice.db.set(f"arq:job:{prefix}-{k}", "{}", ex=600)
        sluice.db.zadd(f"sluice:queue:{model}:{lane}", {f"{prefix}-{k}": 1})


def test_every_queue_with_jobs_is_listed_and_those_that_nobody_serves_are_marked(
    sluice: Command, alive: WorkerProcess
) -> None:
    sluice.db.zadd("sluice:queue:default:batch", {"later": 9_999_999_999_999})
    queue_jobs(sluice, "mispelt", 3)
    sluice.db.set("sluice:queue:foreign:batch", "x")
    code, out, err = sluice("queue", "list")
    rows = [(model, lane, jobs, workers) for model, lane, jobs, _, workers in table(out, "Queues")]
    assert (code, rows) == (0, [("default", "batch", "1", "1"), ("mispelt", "interactive", "3", "none")])
    assert err.startswith("no worker serves 'mispelt', for which 3 jobs wait.")
    said = [json.loads(line) for line in sluice("queue", "list", "--json")[1].splitlines()]
    assert [(each["model"], each["jobs"], each["workers"]) for each in said] == [("default", 1, 1), ("mispelt", 3, 0)]
    _, _, err = sluice("workers")
    assert err.startswith("no worker serves 'mispelt', for which 3 jobs wait.")


def test_a_key_without_a_lane_or_with_a_wrong_one_is_shown_with_what_would_be_right(sluice: Command) -> None:
    sluice.db.zadd("sluice:queue:default", {"a": 1})
    sluice.db.zadd("sluice:queue:default:fast", {"b": 1, "c": 1})
    code, out, err = sluice("queue", "list")
    right = "queue jobs in sluice:queue:default:interactive or sluice:queue:default:batch."
    assert (code, out) == (0, "")
    said = " ".join(err.split())
    assert f"no worker takes the job in 'sluice:queue:default': it has no lane; {right}" in said
    assert f"no worker takes the 2 jobs in 'sluice:queue:default:fast': 'fast' is not a lane; {right}" in said
    shown = [json.loads(line) for line in sluice("queue", "list", "--json")[1].splitlines()]
    assert [(each["key"], each["jobs"]) for each in shown] == [
        ("sluice:queue:default", 1),
        ("sluice:queue:default:fast", 2),
    ]


def test_a_server_without_jobs_is_a_sentence(sluice: Command) -> None:
    assert sluice("queue", "list") == (0, "", "there are no jobs on this server.\n")


def test_a_purge_asks_first_and_does_nothing_without_a_yes(sluice: Command) -> None:
    queue_jobs(sluice, "nobody", 3)
    for answer in ("n\n", ""):
        code, _, err = sluice("queue", "purge", "nobody", stdin=answer)
        assert (code, err.endswith("sluice: nothing was cancelled; --yes cancels without asking.\n")) == (2, True)
    assert sluice.db.zcard("sluice:queue:nobody:interactive") == 3
    code, _, err = sluice("queue", "purge", "nobody", stdin="y\n")
    assert (code, err.endswith("3 jobs cancelled\n")) == (0, True)


def test_ctrl_c_at_the_question_ends_a_purge(sluice: Command, redis_url: str, tmp_path: Path) -> None:
    queue_jobs(sluice, "nobody", 3)
    terminal = Terminal(redis_url, tmp_path, "queue", "purge", "nobody")
    try:
        terminal.until("[y/N]")
        terminal.interrupt()
        assert terminal.process.returncode == 2
    finally:
        terminal.close()
    assert sluice.db.zcard("sluice:queue:nobody:interactive") == 3


def test_a_purge_ends_each_job_of_the_lane_that_is_old_enough(sluice: Command) -> None:
    queue_jobs(sluice, "nobody", 3, "batch")
    queue_jobs(sluice, "nobody", 2, prefix="quick")
    sluice("submit", "Hello!", "--model", "nobody", "--lane", "batch", "--id", "young")
    code, _, err = sluice("queue", "purge", "nobody", "--lane", "batch", "--older-than", "1h", "--yes")
    assert (code, err.splitlines()[-1]) == (0, "3 jobs cancelled")
    assert sluice.db.zrange("sluice:queue:nobody:batch", 0, -1) == ["young"]
    assert sluice.db.zcard("sluice:queue:nobody:interactive") == 2
    (event,) = sluice.log("job-0")
    assert json.loads(event)["type"] == "cancelled"
    assert sluice.db.hget("sluice:job:job-0", "state") == "cancelled"


@pytest.mark.parametrize("age", ["", "1", "h", "-1h", "1.5h", "1w", "٣h"])
def test_an_age_that_is_none_is_a_sentence(sluice: Command, age: str) -> None:
    code, _, err = sluice("queue", "purge", "nobody", "--older-than", age, "--yes")
    assert (code, "one looks like 90s" in err) == (2, True)


def test_one_job_is_no_jobs(sluice: Command, alive: WorkerProcess) -> None:
    sluice("submit", "Hello!", "--model", "nobody")
    said = [
        sluice(*args)[2] for args in (("workers",), ("queue", "purge", "nobody"), ("queue", "purge", "nobody", "-y"))
    ]
    assert "no worker serves 'nobody', for which 1 job waits." in said[0]
    assert "Cancel the waiting ones of 1 interactive job for 'nobody'?" in said[1]
    assert said[2].endswith("\n1 job cancelled\n")


def test_a_purge_of_a_model_without_jobs_is_no_failure(sluice: Command) -> None:
    code, _, err = sluice("queue", "purge", "nobody", "--yes")
    assert (code, err) == (0, "there are no jobs for 'nobody' on this server.\n0 jobs cancelled\n")


def test_submit_refuses_a_model_that_nobody_serves_if_told_to_and_names_a_close_one(
    sluice: Command, alive: WorkerProcess
) -> None:
    code, out, err = sluice("submit", "Hello!", "--model", "defualt", "--wait-worker", "0.3")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "no worker serves 'defualt'; did you mean 'default'" in err
    assert sluice.db.keys("sluice:queue:defualt:*") == []
    code, out, _ = sluice("submit", "Count to 3.", "--wait-worker", "0", "--json")
    assert (code, json.loads(out)["served"]) == (0, True)


def test_submit_warns_of_a_model_that_nobody_serves_and_queues_the_job(sluice: Command, alive: WorkerProcess) -> None:
    code, out, err = sluice("submit", "Hello!", "--model", "defualt", "--id", "a")
    assert (code, out, "did you mean default?" in err) == (0, "a\n", True)
    assert sluice("cancel", "a")[:2] == (0, "a  cancelled\n")
    assert sluice.db.keys("sluice:queue:defualt:*") == []


@pytest.mark.parametrize("entry", ["x", "[1]", '{"id":"bad"}', '{"id":1}', "\ud83d\ude42", "[" * 100_000])
def test_an_entry_that_cannot_be_read_is_a_dead_letter_to_drop(sluice: Command, entry: str) -> None:
    sluice.db.hset("sluice:dead", "bad", entry.encode("utf-8", "replace"))
    code, out, _ = sluice("dead", "list")
    assert (code, table(out, "Dead letters")[0][:2]) == (0, ["bad", "?"])
    code, _, err = sluice("dead", "retry", "bad")
    assert (code, "sluice dead drop bad" in err) == (2, True)
    assert sluice("dead", "drop", "bad")[0] == 0
    assert sluice.db.hkeys("sluice:dead") == []
