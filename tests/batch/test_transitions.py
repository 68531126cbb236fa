"""The transition tables of a run and of its lines: each pair of a state and an event is listed or refused."""

import time
from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.batch.dispatcher import InFlightLine, Outcome
from sluice.batch.files import LineError
from sluice.batch.source import Line
from sluice.batch.transitions import (
    LINE_STEPS,
    RUN_STEPS,
    LineAction,
    LineEvent,
    LineState,
    RunAction,
    RunEvent,
    line_step,
    run_step,
)
from sluice.contract.batch import ENDED, BatchState, LineDetails

STATES: tuple[BatchState, ...] = get_args(BatchState)
FAILED, CUT = LineDetails("failed"), LineDetails("cut")
RUN_ERROR = Outcome(FAILED, error=LineError("batch_cancelled", "The run was cancelled."))
OUTCOMES: dict[LineEvent, Outcome] = {
    LineEvent.JOB_CANCELLED: Outcome(FAILED, error=LineError("cancelled", "The job was cancelled.")),
    LineEvent.JOB_TO_MEND: Outcome(CUT, b"{}"),
    LineEvent.JOB_ENDED: Outcome(LineDetails("answered"), b"{}"),
    LineEvent.REFUSED: Outcome(FAILED, error=LineError("invalid_type", "input: it must be a string.", 400)),
    LineEvent.RUN_ENDED: RUN_ERROR,
}


@pytest.mark.parametrize(("state", "event"), [*product(STATES, RunEvent)])
def test_a_run_event_is_listed_or_refused(state: BatchState, event: RunEvent) -> None:
    if (state, event) in RUN_STEPS:
        state, action = run_step(state, event)
        assert (state in ENDED) == (action is RunAction.END)
        assert (event is RunEvent.RERUN) <= (action is RunAction.FEED)
    else:
        with pytest.raises(RuntimeError, match=f"{state}: {event} "):
            run_step(state, event)


@pytest.mark.parametrize("state", STATES)
def test_an_unfinished_run_may_be_resumed_or_refused_and_an_ended_one_only_run_again(state: BatchState) -> None:
    events = {event for listed, event in RUN_STEPS if listed == state}
    if state in ENDED:
        assert events == (set() if state == "failed" else {RunEvent.RERUN}), "a refused run has no lines"
    else:
        assert events >= {RunEvent.ACCEPTED, RunEvent.REFUSED}


# The events that an action can return, as `Run` performs it.
RETURNED = {
    RunAction.FEED: {RunEvent.LINES_DONE, RunEvent.CANCEL_REQUESTED, RunEvent.WINDOW_OVER},
    RunAction.CANCEL_LINES: {RunEvent.LINES_CLOSED},
    RunAction.EXPIRE_LINES: {RunEvent.LINES_CLOSED},
    RunAction.END: set[RunEvent](),
}


def test_exactly_the_events_that_can_occur_are_listed() -> None:
    unfinished = {*STATES} - ENDED
    pairs, waiting = set[tuple[BatchState, RunEvent]](), {*product(unfinished, (RunEvent.ACCEPTED, RunEvent.REFUSED))}
    while waiting:
        pairs.add(pair := waiting.pop())
        state, action = run_step(*pair)
        waiting |= {*product([state], RETURNED[action])} - pairs
    assert pairs == {pair for pair in RUN_STEPS if pair[1] is not RunEvent.RERUN}


@pytest.mark.parametrize(("state", "event"), [*product(LineState, LineEvent)])
def test_a_line_event_is_listed_or_refused(state: LineState, event: LineEvent) -> None:
    if (state, event) in LINE_STEPS:
        state, action = line_step(state, event)
        records = action in (LineAction.RECORD, LineAction.RECORD_RUN_ERROR)
        assert records == (state is LineState.ENDED)
    else:
        with pytest.raises(RuntimeError, match=f"{state}: {event} "):
            line_step(state, event)


def test_an_ended_line_has_no_events_and_every_other_one_may_end_with_its_run() -> None:
    assert {state for state, _ in LINE_STEPS} == {*LineState} - {LineState.ENDED}
    ending = {state for state, event in LINE_STEPS if event is LineEvent.RUN_ENDED}
    assert ending == {*LineState} - {LineState.ENDED}


def new_line() -> InFlightLine:
    return InFlightLine(Line(1, 0, 0, "default", b"", b""))


def apply(entry: InFlightLine, *events: LineEvent) -> list[Outcome | None]:
    return [entry.apply(event, outcome=OUTCOMES.get(event)) for event in events]


@given(st.lists(st.sampled_from(LineEvent), max_size=20))
def test_a_line_follows_the_table_and_has_an_outcome_only_when_it_ends(events: list[LineEvent]) -> None:
    entry, retries = new_line(), 0
    for event in events:
        if (entry.state, event) not in LINE_STEPS:
            with pytest.raises(RuntimeError, match="cannot occur"):
                apply(entry, event)
            continue
        state, action = line_step(entry.state, event)
        retries += action in (LineAction.RETRY, LineAction.MEND)
        (outcome,) = apply(entry, event)
        assert (entry.state, entry.retry) == (state, retries)
        assert (outcome is not None) == (entry.state is LineState.ENDED)


@pytest.mark.parametrize("event", [LineEvent.JOB_GONE, LineEvent.JOB_TO_RETRY])
def test_a_line_is_queued_again_after_its_wait_and_counts_failures_alone(event: LineEvent) -> None:
    entry = new_line()
    entry.apply(LineEvent.JOB_QUEUED)
    entry.apply(event, wait_s=60.0)
    assert (entry.retry, entry.failures, entry.has_job) == (1, int(event is LineEvent.JOB_TO_RETRY), False)
    assert 50 < entry.due - time.monotonic() <= 60


ENDINGS = [LineEvent.JOB_GONE, LineEvent.JOB_TO_RETRY, LineEvent.JOB_CANCELLED, LineEvent.RUN_ENDED]


@pytest.mark.parametrize("event", ENDINGS)
def test_a_closing_line_gets_the_error_of_its_run(event: LineEvent) -> None:
    outcomes = apply(new_line(), LineEvent.JOB_QUEUED, LineEvent.RUN_ENDED, event)
    assert outcomes == [None, None, RUN_ERROR]


def test_a_closing_line_keeps_an_answer_that_still_arrives() -> None:
    for event in (LineEvent.JOB_ENDED, LineEvent.JOB_TO_MEND):
        outcomes = apply(new_line(), LineEvent.JOB_QUEUED, LineEvent.RUN_ENDED, event)
        assert outcomes == [None, None, OUTCOMES[event]], "it is not run again"


def test_a_line_that_is_run_again_keeps_its_outcome_first_and_counts_its_failures_anew() -> None:
    entry = new_line()
    retried = [LineEvent.JOB_QUEUED, LineEvent.JOB_TO_RETRY] * 3
    assert apply(entry, *retried, LineEvent.JOB_QUEUED, LineEvent.JOB_TO_MEND) == [None] * 8
    assert (entry.retry, entry.mends, entry.failures, entry.last) == (4, 1, 0, CUT)
    assert entry.to_keep == OUTCOMES[LineEvent.JOB_TO_MEND]
