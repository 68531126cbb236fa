"""`sluice why`: where the time of a job went."""

import asyncio
import json
import time
from typing import Any

import pytest

from sluice import Client
from sluice.cli.commands.why import _LEASE, _read_fields
from sluice.contract import keys
from sluice.contract.phases import JobPhases
from tests.end_to_end.test_cli import Command

pytestmark = pytest.mark.usefixtures("worker")


def shown(sluice: Command, job_id: str) -> dict[str, Any]:
    code, out, err = sluice("why", job_id, "--json")
    assert code == 0, err
    read: dict[str, Any] = json.loads(out)
    return read


def names(read: dict[str, Any]) -> list[str]:
    return [phase["name"] for phase in read["phases"] if phase["name"] != "load"]


def test_the_phases_of_a_finished_job_last_as_long_as_it_did(sluice: Command) -> None:
    code, out, _ = sluice("submit", "Count to 5.", "--id", "why-1", "--wait", "--json")
    assert code == 0
    timings = json.loads(out)["sluice"]["timings"]
    read = shown(sluice, "why-1")
    assert names(read) == ["queue", "prepare", "admission", "prefill", "decode"]
    assert (read["state"], read["model"], read["lane"]) == ("finished", "default", "interactive")
    (first,) = read["moments"]
    claimed_at = read["phases"][0]["ended"]
    assert first["name"] == "first_token"
    assert first["at"] - claimed_at == pytest.approx(timings["ttft_s"], abs=0.05)
    seconds = sum(phase["ended"] - phase["began"] for phase in read["phases"])
    assert seconds == pytest.approx(read["phases"][-1]["ended"] - read["phases"][0]["began"])
    code, out, _ = sluice("why", "why-1")
    assert code == 0
    assert out.startswith("why-1: finished, ")
    assert out.index("queue") < out.index("prefill") < out.index("decode")


def test_a_prompt_that_is_computed_in_one_step_took_its_time_in_prefill(sluice: Command) -> None:
    assert sluice("submit", "word " * 200, "--id", "why-9", "--wait")[0] == 0
    lasted = {phase["name"]: phase["ended"] - phase["began"] for phase in shown(sluice, "why-9")["phases"]}
    assert lasted["prefill"] > lasted["admission"], lasted


def test_a_job_that_waits_shows_its_queue_alone_and_one_that_was_cancelled_there_too(sluice: Command) -> None:
    assert sluice("submit", "Count to 5.", "--id", "why-2", "--model", "nobody")[0] == 0
    assert names(shown(sluice, "why-2")) == ["queue"]
    assert shown(sluice, "why-2")["phases"][0]["ended"] is None
    assert "queue ..." in sluice("why", "why-2")[1]
    sluice("cancel", "why-2")
    assert names(shown(sluice, "why-2")) == ["queue"]
    assert shown(sluice, "why-2")["phases"][0]["ended"] is not None


def test_a_job_that_runs_shows_what_it_does(sluice: Command) -> None:
    endless = {
        "messages": [{"role": "user", "content": "Count to 40."}], "max_tokens": 30_000, "logit_bias": {"2": -100},
        "loop_guard": False,
    }  # fmt: skip
    sluice("submit", "--file", "-", "--id", "why-3", stdin=json.dumps(endless))
    sluice.wait_until_running("why-3")
    deadline = time.monotonic() + 60
    while names(shown(sluice, "why-3"))[-1] != "decode":
        assert time.monotonic() < deadline
    assert "decode ..." in sluice("why", "why-3")[1]
    sluice("cancel", "why-3")
    read = shown(sluice, "why-3")
    assert (read["state"], names(read)[-1]) == ("cancelled", "decode")
    assert read["phases"][-1]["ended"] is not None


def test_a_refused_job_ends_while_it_is_prepared(sluice: Command) -> None:
    bad = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 5}
    assert sluice("submit", "--file", "-", "--id", "why-4", "--wait", stdin=json.dumps(bad))[0] == 1
    assert names(shown(sluice, "why-4")) == ["queue", "prepare"]


def test_what_another_program_wrote_into_the_state_is_left_out(sluice: Command) -> None:
    sluice.db.hset(
        "sluice:job:why-5", mapping={"state": "running", "queued_at": "x", "phases": "[[", "attempt": "many"}
    )
    code, out, err = sluice("why", "why-5")
    assert (code, out) == (0, "")
    assert "nothing else is known" in err
    assert "its worker is gone" in err
    sluice.db.hset("sluice:job:why-5", mapping={"queued_at": "5", "started_at": "inf", "attempt": "inf"})
    assert names(shown(sluice, "why-5")) == ["queue"]
    sluice.db.hset("sluice:job:why-5", mapping={"state": b"\xff", "model": b"\xff"})
    assert (shown(sluice, "why-5")["state"], shown(sluice, "why-5")["model"]) == ("\ufffd", "\ufffd")


def test_a_job_past_its_deadline_is_shown_with_its_end(sluice: Command) -> None:
    request = {"messages": [{"role": "user", "content": "Hello!"}], "deadline_s": 0.1}
    sluice("submit", "--file", "-", "--id", "why-7", "--model", "nobody", stdin=json.dumps(request))
    time.sleep(0.2)
    read = shown(sluice, "why-7")
    assert (read["state"], names(read)) == ("failed", ["queue"])
    assert read["phases"][0]["ended"] is not None


def test_a_job_that_was_cancelled_after_a_requeue_has_an_end(sluice: Command) -> None:
    phases = JobPhases()
    phases.begin(1, "a", 0, queued_at=10, seen_at=0, now=12)
    phases.mark("queue", 14)
    sluice.db.hset(
        "sluice:job:why-8", mapping={"state": "cancelled", "finished_at": "17.5", "phases": phases.as_json()}
    )
    assert [(phase["name"], phase["ended"]) for phase in shown(sluice, "why-8")["phases"]] == [
        ("queue", 12), ("prepare", 14), ("queue", 17.5),
    ]  # fmt: skip
    assert "7.500 s" in sluice("why", "why-8")[1]


def test_a_job_of_a_plain_producer_waits(sluice: Command) -> None:
    sluice.db.set("arq:job:why-6", "{}")
    code, out, err = sluice("why", "why-6")
    assert (code, out) == (0, "")
    assert "why-6 is queued" in err


@pytest.mark.parametrize("job_id", ["unknown-1", "no id!"])
def test_an_unknown_job_is_an_error(sluice: Command, job_id: str) -> None:
    code, out, err = sluice("why", job_id)
    assert (code, out) == (2, "")
    assert "sluice:" in err


def test_a_job_that_failed_tells_its_error_as_long_as_its_result_is_there(sluice: Command) -> None:
    sluice("submit", "--file", "-", "--id", "why-failed", "--wait", stdin='{"messages": "Hello"}')
    code, out, err = sluice("why", "why-failed")
    assert (code, out.startswith("why-failed: failed, ")) == (0, True)
    assert err == "invalid_request: messages must be a list, not a string.\n"
    sluice.db.delete("sluice:result:why-failed")
    assert sluice("why", "why-failed")[2] == "its error has expired.\n"


async def test_a_job_and_its_lease_are_read_at_once(client: Client) -> None:
    lease, done = "arq:in-progress:brief", asyncio.Event()

    async def change(state: str, owner: str) -> None:
        async with client.redis.pipeline() as pipe:
            pipe.hset(keys.job("brief"), "state", state)
            pipe.set(lease, owner) if owner else pipe.delete(lease)
            await pipe.execute()

    async def run_and_end() -> None:
        while not done.is_set():
            await change("running", "mac:1")
            await change("finished", "")

    running = asyncio.create_task(run_and_end())
    read = [(await _read_fields(client.redis, "brief"))[0] for _ in range(300)]
    done.set()
    await running
    seen = {(each.get(b"state"), each[_LEASE]) for each in read}
    assert seen <= {(None, b""), (b"running", b"mac:1"), (b"finished", b"")}
    assert len(seen) > 1
