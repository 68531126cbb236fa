"""Transition tables of a run and of its lines: what follows each event in each state. An event that a state does not
list cannot occur in it."""

from collections.abc import Mapping
from enum import Enum

from sluice.contract.batch import BatchState


class RunEvent(Enum):
    """An event of a run."""

    ACCEPTED = "the input was read, for a new or a resumed run"
    REFUSED = "the input or its models were refused"
    LINES_DONE = "every line has a result"
    CANCEL_REQUESTED = "the cancellation of the run was requested"
    WINDOW_OVER = "the completion window ran out"
    LINES_CLOSED = "every unfinished line has an error"
    RERUN = "lines of the ended run are to be run again"


class RunAction(Enum):
    """Action after a transition."""

    FEED = "queue lines and collect results"
    CANCEL_LINES = "end the unfinished lines as cancelled"
    EXPIRE_LINES = "end the unfinished lines as expired"
    END = "nothing more"


# A resumed run is accepted in the state that was saved. One that was finalizing has all results, unless its files were
# changed meanwhile: then it is fed again.
RUN_STEPS: Mapping[tuple[BatchState, RunEvent], tuple[BatchState, RunAction]] = {
    ("validating", RunEvent.ACCEPTED): ("in_progress", RunAction.FEED),
    ("validating", RunEvent.REFUSED): ("failed", RunAction.END),
    ("in_progress", RunEvent.ACCEPTED): ("in_progress", RunAction.FEED),
    ("in_progress", RunEvent.REFUSED): ("failed", RunAction.END),
    ("in_progress", RunEvent.LINES_DONE): ("finalizing", RunAction.FEED),
    ("in_progress", RunEvent.CANCEL_REQUESTED): ("cancelling", RunAction.CANCEL_LINES),
    ("in_progress", RunEvent.WINDOW_OVER): ("in_progress", RunAction.EXPIRE_LINES),
    ("in_progress", RunEvent.LINES_CLOSED): ("expired", RunAction.END),
    ("finalizing", RunEvent.ACCEPTED): ("finalizing", RunAction.FEED),
    ("finalizing", RunEvent.REFUSED): ("failed", RunAction.END),
    ("finalizing", RunEvent.LINES_DONE): ("completed", RunAction.END),
    ("finalizing", RunEvent.CANCEL_REQUESTED): ("cancelling", RunAction.CANCEL_LINES),
    ("finalizing", RunEvent.WINDOW_OVER): ("finalizing", RunAction.EXPIRE_LINES),
    ("finalizing", RunEvent.LINES_CLOSED): ("expired", RunAction.END),
    ("cancelling", RunEvent.ACCEPTED): ("cancelling", RunAction.CANCEL_LINES),
    ("cancelling", RunEvent.REFUSED): ("failed", RunAction.END),
    ("cancelling", RunEvent.LINES_CLOSED): ("cancelled", RunAction.END),
    ("completed", RunEvent.RERUN): ("in_progress", RunAction.FEED),
    ("expired", RunEvent.RERUN): ("in_progress", RunAction.FEED),
    ("cancelled", RunEvent.RERUN): ("in_progress", RunAction.FEED),
}


def run_step(state: BatchState, event: RunEvent) -> tuple[BatchState, RunAction]:
    """Return what follows an event of a run: the state to enter and save, and then the action. Raises RuntimeError for
    one that cannot occur in the state."""
    if step := RUN_STEPS.get((state, event)):
        return step
    raise _unexpected(state, event)


def _unexpected(state: object, event: object) -> RuntimeError:
    return RuntimeError(f"{state}: {event} cannot occur in this state; please report it")


class LineState(Enum):
    """State of a line in the window."""

    WAITING = "waiting"  # until it is due
    QUEUED = "queued"  # its job is queued or running
    CLOSING = "closing"  # the run ends early and has cancelled its job, which may still end otherwise
    ENDED = "ended"  # it has an outcome


class LineEvent(Enum):
    """An event of a line."""

    REFUSED = "its request cannot be made a job"
    JOB_QUEUED = "the server has queued its job"
    JOB_REJECTED = "the server is full and did not queue its job"
    JOB_GONE = "the server has lost its job, or it was withdrawn from a full server"
    JOB_TO_RETRY = "its job failed, and another attempt may succeed"
    JOB_TO_MEND = "its job ended with a kind of outcome that the run's options let it run again"
    JOB_CANCELLED = "its job was cancelled, by the run itself or by another client"
    JOB_ENDED = "its job ended with an answer, or failed for good"
    RUN_ENDED = "the run ends early; for a line whose job it has cancelled, the time for such jobs is over"


class LineAction(Enum):
    """Action after a transition."""

    NOTHING = "nothing"
    POSTPONE = "wait, then queue the same job"
    RETRY = "wait, then queue the line under a new job id, since ids are used once"
    MEND = "keep the outcome of the event, then queue the line with a changed request under a new job id"
    CLOSE = "keep the run's error, and wait for the job"
    RECORD = "record the outcome of the event"
    RECORD_RUN_ERROR = "record the run's error"


LINE_STEPS: Mapping[tuple[LineState, LineEvent], tuple[LineState, LineAction]] = {
    (LineState.WAITING, LineEvent.REFUSED): (LineState.ENDED, LineAction.RECORD),
    (LineState.WAITING, LineEvent.JOB_QUEUED): (LineState.QUEUED, LineAction.NOTHING),
    (LineState.WAITING, LineEvent.JOB_REJECTED): (LineState.WAITING, LineAction.POSTPONE),
    (LineState.WAITING, LineEvent.RUN_ENDED): (LineState.ENDED, LineAction.RECORD),
    (LineState.QUEUED, LineEvent.JOB_GONE): (LineState.WAITING, LineAction.RETRY),
    (LineState.QUEUED, LineEvent.JOB_TO_RETRY): (LineState.WAITING, LineAction.RETRY),
    (LineState.QUEUED, LineEvent.JOB_TO_MEND): (LineState.WAITING, LineAction.MEND),
    (LineState.QUEUED, LineEvent.JOB_CANCELLED): (LineState.ENDED, LineAction.RECORD),
    (LineState.QUEUED, LineEvent.JOB_ENDED): (LineState.ENDED, LineAction.RECORD),
    (LineState.QUEUED, LineEvent.RUN_ENDED): (LineState.CLOSING, LineAction.CLOSE),
    (LineState.CLOSING, LineEvent.JOB_GONE): (LineState.ENDED, LineAction.RECORD_RUN_ERROR),
    (LineState.CLOSING, LineEvent.JOB_TO_RETRY): (LineState.ENDED, LineAction.RECORD_RUN_ERROR),
    (LineState.CLOSING, LineEvent.JOB_TO_MEND): (LineState.ENDED, LineAction.RECORD),
    (LineState.CLOSING, LineEvent.JOB_CANCELLED): (LineState.ENDED, LineAction.RECORD_RUN_ERROR),
    (LineState.CLOSING, LineEvent.JOB_ENDED): (LineState.ENDED, LineAction.RECORD),
    (LineState.CLOSING, LineEvent.RUN_ENDED): (LineState.ENDED, LineAction.RECORD),
}


def line_step(state: LineState, event: LineEvent) -> tuple[LineState, LineAction]:
    """Return what follows an event of a line. Raises RuntimeError for one that cannot occur in the state."""
    if step := LINE_STEPS.get((state, event)):
        return step
    raise _unexpected(state, event)
