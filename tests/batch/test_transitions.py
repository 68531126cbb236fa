"""The transition tables of a run and of its lines: each pair of a state and an event is listed or refused."""

from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.batch.dispatcher import InFlightLine
from sluice.batch.source import Line
from sluice.batch.transitions import (
    LINE_STEPS,
    RUN_STEPS,
    JobEnded,
    JobGone,
    JobQueued,
    JobRejected,
    JobToRetry,
    JobWasCancelled,
    LineAction,
    LineError,
    LineEvent,
    LineState,
    RunAction,
    RunEnded,
    RunEvent,
    UnexpectedEvent,
    line_step,
    run_step,
)
from sluice.contract.batch import ENDED, BatchState

STATES: tuple[BatchState, ...] = get_args(BatchState)
RUN_ERROR = LineError("batch_cancelled", "The run was cancelled.")
EVENTS: tuple[LineEvent, ...] = (
    JobQueued(),
    JobRejected(0.0),
    JobGone(0.0),
    JobToRetry(0.0),
    JobWasCancelled(LineError("cancelled", "The job was cancelled.")),
    JobEnded(b"{}"),
    RunEnded(RUN_ERROR),
)


@pytest.mark.parametrize(("state", "event"), [*product(STATES, RunEvent)])
def test_a_run_event_is_listed_or_refused(state: BatchState, event: RunEvent) -> None:
    if (state, event) in RUN_STEPS:
        step = run_step(state, event)
        assert (step.state in ENDED) == (step.action is RunAction.END)
    else:
        with pytest.raises(UnexpectedEvent) as refused:
            run_step(state, event)
        assert (refused.value.state, refused.value.event) == (state, event)


@pytest.mark.parametrize("state", STATES)
def test_only_an_unfinished_run_has_events_and_each_may_be_resumed_or_refused(state: BatchState) -> None:
    events = {event for listed, event in RUN_STEPS if listed == state}
    assert events >= {RunEvent.ACCEPTED, RunEvent.REFUSED} if state not in ENDED else not events


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
        step = run_step(*pair)
        waiting |= {*product([step.state], RETURNED[step.action])} - pairs
    assert pairs == RUN_STEPS.keys()


@pytest.mark.parametrize(("state", "event"), [*product(LineState, EVENTS)])
def test_a_line_event_is_listed_or_refused(state: LineState, event: LineEvent) -> None:
    if (state, type(event)) in LINE_STEPS:
        step = line_step(state, event)
        records = step.action in (LineAction.RECORD, LineAction.RECORD_RUN_ERROR)
        assert records == (step.state is LineState.ENDED)
    else:
        with pytest.raises(UnexpectedEvent) as refused:
            line_step(state, event)
        assert (refused.value.state, refused.value.event) == (state, event)


def test_an_ended_line_has_no_events_and_every_other_one_may_end_with_its_run() -> None:
    assert {state for state, _ in LINE_STEPS} == {*LineState} - {LineState.ENDED}
    assert {state for state, event in LINE_STEPS if event is RunEnded} == {*LineState} - {LineState.ENDED}


def new_line() -> InFlightLine:
    return InFlightLine(Line(1, 0, 0, "default", b"", b""))


@given(st.lists(st.sampled_from(EVENTS), max_size=20))
def test_a_line_follows_the_table_and_has_an_outcome_only_when_it_ends(events: list[LineEvent]) -> None:
    entry, retries = new_line(), 0
    for event in events:
        if (entry.state, type(event)) not in LINE_STEPS:
            with pytest.raises(UnexpectedEvent):
                entry.apply(event)
            continue
        step = line_step(entry.state, event)
        retries += step.action is LineAction.RETRY
        outcome = entry.apply(event)
        assert (entry.state, entry.retry) == (step.state, retries)
        assert (outcome is not None) == (entry.state is LineState.ENDED)


@pytest.mark.parametrize("event", [JobGone(0.0), JobToRetry(0.0), EVENTS[4], RunEnded(RUN_ERROR)])
def test_a_closing_line_gets_the_error_of_its_run(event: LineEvent) -> None:
    entry = new_line()
    assert [entry.apply(each) for each in (JobQueued(), RunEnded(RUN_ERROR), event)] == [None, None, RUN_ERROR]


def test_a_closing_line_keeps_an_answer_that_still_arrives() -> None:
    entry = new_line()
    assert [entry.apply(each) for each in (JobQueued(), RunEnded(RUN_ERROR), JobEnded(b"{}"))] == [None, None, b"{}"]
