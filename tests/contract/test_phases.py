"""The phases of a job, over its attempts."""

import json

import pytest

from sluice.contract.phases import JobPhases, Phase


def two_attempts(lapses: int = 1) -> JobPhases:
    """A job whose first worker was lost after its first token, and whose second was preempted once."""
    phases = JobPhases()
    phases.begin(1, "a", 0, queued_at=10, seen_at=0, now=12)
    for name, at in (("admission", 13), ("prefill", 14), ("decode", 16), ("first_token", 17)):
        phases.mark(name, at)  # type: ignore[arg-type]
    later = JobPhases.read(phases.as_json().encode())
    later.begin(2, "b", lapses, queued_at=10, seen_at=19, now=21)
    for name, at in (("decode", 22), ("preempted", 23), ("decode", 25), ("finished", 26)):
        later.mark(name, at)  # type: ignore[arg-type]
    return later


def test_phases_follow_each_other_over_all_attempts() -> None:
    assert [*two_attempts().phases()] == [
        Phase("queue", 1, "a", 10, 12),
        Phase("prepare", 1, "a", 12, 13),
        Phase("admission", 1, "a", 13, 14),
        Phase("prefill", 1, "a", 14, 16),
        Phase("decode", 1, "a", 16, 19),
        Phase("queue", 2, "b", 19, 21),
        Phase("prepare", 2, "b", 21, 22),
        Phase("decode", 2, "b", 22, 23),
        Phase("preempted", 2, "b", 23, 25),
        Phase("decode", 2, "b", 25, 26),
    ]


@pytest.mark.parametrize(("lapses", "name"), [(1, "takeover"), (0, "requeue")])
def test_an_expired_lease_makes_the_next_attempt_a_takeover(lapses: int, name: str) -> None:
    moments = [(each.name, each.at) for each in two_attempts(lapses).moments()]
    assert moments == [("first_token", 17), (name, 21), ("preempt", 23), ("resume", 25)]


def test_the_last_phase_of_a_job_that_runs_has_no_end() -> None:
    phases = JobPhases()
    phases.begin(1, "a", 0, queued_at=10, seen_at=0, now=12)
    phases.loaded(1.5)
    assert [*phases.phases()] == [
        Phase("queue", 1, "a", 10, 10.5), Phase("load", 1, "a", 10.5, 12), Phase("prepare", 1, "a", 12, None),
    ]  # fmt: skip


def test_a_clock_that_is_set_back_makes_no_phase_that_ends_before_it_begins() -> None:
    phases = JobPhases()
    phases.begin(1, "a", 0, queued_at=99, seen_at=0, now=12)  # a producer's clock that is ahead
    phases.mark("admission", 11)
    phases.begin(2, "b", 1, queued_at=99, seen_at=0, now=5)
    phases.mark("admission", 6)
    assert all(phase.ended is None or phase.ended >= phase.began for phase in phases.phases())


def test_the_record_stays_short() -> None:
    phases = JobPhases()
    for attempt in range(1, 41):
        phases.begin(attempt, "a", 0, queued_at=0, seen_at=0, now=attempt)
        for _ in range(100):
            phases.mark("preempted", attempt)
        phases.mark("finished", attempt + 0.5)
    assert len(json.loads(phases.as_json())) == 16
    assert max(len(marks) for *_, marks in json.loads(phases.as_json())) == 64
    assert phases.span == (24.5, 40.5)  # the end is kept
    assert [*JobPhases.read(phases.as_json().encode()).phases()] == [*phases.phases()]


def test_a_preempted_job_that_is_requeued_does_not_go_on_in_its_queue() -> None:
    phases = JobPhases()
    phases.begin(1, "a", 0, queued_at=10, seen_at=0, now=12)
    phases.mark("preempted", 13)
    phases.mark("queue", 14)
    assert [each.name for each in phases.moments()] == ["preempt"]


@pytest.mark.parametrize(
    "stored",
    [b"", b"{", b"1", b"[1]", b"[[1]]", b'[[1,"a",0,[]]]', b'[[1,"a",0,[["queue",1],["load",2]]]]', b"\xff",
     b'[[1,"a",0,[["queue",1],["prepare",1e99]]]]', b'[[1,"a",0,[["queue",NaN],["prepare",2]]]]',
     b'[[1,"a",0,[["queue",1],["prepare",1e11]]]]', b'[[1e300,"a",0,[["queue",1],["prepare",2]]]]',
     b'[[1e999,"a",0,[["queue",1],["prepare",2]]]]', b'[[1,"a",0,[["queue",1],["prepare",1%s]]]]' % (b"0" * 400),
     b'[["x","a",0,[["queue",1],["prepare",2]]]]', b'{"a":1}', b"[" * 60_000, b"[" + b" " * 70_000 + b"]"],
)  # fmt: skip
def test_what_no_worker_wrote_is_nothing(stored: bytes) -> None:
    assert [*JobPhases.read(stored).phases()] == [*JobPhases.read(None).phases()] == []
