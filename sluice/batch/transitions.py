"""Transition tables of a run and of its lines: what follows each event in each state. An event that a state does not
list cannot occur in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sluice.contract.batch import BatchState


class UnexpectedEvent(RuntimeError):
    """An event occurred in a state that does not list it."""

    def __init__(self, state: object, event: object) -> None:
        super().__init__(state, event)
        self.state = state
        self.event = event

    def __str__(self) -> str:
        return f"{self.state}: {self.event} cannot occur in this state; please report it"


class RunEvent(Enum):
    """An event of a run."""

    ACCEPTED = "the input was read, for a new or a resumed run"
    REFUSED = "the input or its models were refused"
    LINES_DONE = "every line has a result"
    CANCEL_REQUESTED = "the cancellation of the run was requested"
    WINDOW_OVER = "the completion window ran out"
    LINES_CLOSED = "every unfinished line has an error"


class RunAction(Enum):
    """Action after a transition."""

    FEED = "queue lines and collect results"
    CANCEL_LINES = "end the unfinished lines as cancelled"
    EXPIRE_LINES = "end the unfinished lines as expired"
    END = "nothing more"


@dataclass(frozen=True, slots=True)
class _RunStep:
    """A transition of a run: the state to enter and save, and then the action."""

    state: BatchState
    action: RunAction


# A resumed run is accepted in the state that was saved. One that was finalizing has all results, unless its files were
# changed meanwhile: then it is fed again.
RUN_STEPS: Mapping[tuple[BatchState, RunEvent], _RunStep] = {
    ("validating", RunEvent.ACCEPTED): _RunStep("in_progress", RunAction.FEED),
    ("validating", RunEvent.REFUSED): _RunStep("failed", RunAction.END),
    ("in_progress", RunEvent.ACCEPTED): _RunStep("in_progress", RunAction.FEED),
    ("in_progress", RunEvent.REFUSED): _RunStep("failed", RunAction.END),
    ("in_progress", RunEvent.LINES_DONE): _RunStep("finalizing", RunAction.FEED),
    ("in_progress", RunEvent.CANCEL_REQUESTED): _RunStep("cancelling", RunAction.CANCEL_LINES),
    ("in_progress", RunEvent.WINDOW_OVER): _RunStep("in_progress", RunAction.EXPIRE_LINES),
    ("in_progress", RunEvent.LINES_CLOSED): _RunStep("expired", RunAction.END),
    ("finalizing", RunEvent.ACCEPTED): _RunStep("finalizing", RunAction.FEED),
    ("finalizing", RunEvent.REFUSED): _RunStep("failed", RunAction.END),
    ("finalizing", RunEvent.LINES_DONE): _RunStep("completed", RunAction.END),
    ("finalizing", RunEvent.CANCEL_REQUESTED): _RunStep("cancelling", RunAction.CANCEL_LINES),
    ("finalizing", RunEvent.WINDOW_OVER): _RunStep("finalizing", RunAction.EXPIRE_LINES),
    ("finalizing", RunEvent.LINES_CLOSED): _RunStep("expired", RunAction.END),
    ("cancelling", RunEvent.ACCEPTED): _RunStep("cancelling", RunAction.CANCEL_LINES),
    ("cancelling", RunEvent.REFUSED): _RunStep("failed", RunAction.END),
    ("cancelling", RunEvent.LINES_CLOSED): _RunStep("cancelled", RunAction.END),
}


def run_step(state: BatchState, event: RunEvent) -> _RunStep:
    """Return what follows an event of a run. Raises `UnexpectedEvent`."""
    if step := RUN_STEPS.get((state, event)):
        return step
    raise UnexpectedEvent(state, event)


class LineState(Enum):
    """State of a line in the window."""

    WAITING = "waiting"  # until it is due
    QUEUED = "queued"  # its job is queued or running
    CLOSING = "closing"  # the run ends early and has cancelled its job, which may still end otherwise
    ENDED = "ended"  # it has an outcome


@dataclass(frozen=True, slots=True)
class LineError:
    """Code and message of a line that failed, and the HTTP response that OpenAI's interface gives for it. Its status is
    0 if no job of the line has ended."""

    code: str
    message: str
    status: int = 0
    body: bytes = b""  # JSON


@dataclass(frozen=True, slots=True)
class JobQueued:
    """The server has queued the line's job."""


@dataclass(frozen=True, slots=True)
class JobRejected:
    """The server is full and did not queue the line's job."""

    wait_s: float  # before the next attempt


@dataclass(frozen=True, slots=True)
class JobGone:
    """The server has lost the job, or it was withdrawn from a full server."""

    wait_s: float  # before the line is queued again


@dataclass(frozen=True, slots=True)
class JobToRetry:
    """The job failed, and another attempt may succeed."""

    wait_s: float  # before the line is queued again


@dataclass(frozen=True, slots=True)
class JobWasCancelled:
    """The job was cancelled, by the run itself or by another client."""

    error: LineError


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job ended with an answer, as the worker wrote it, or failed for good."""

    outcome: bytes | LineError


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run ends early. For a line whose job it has cancelled: the time for such jobs is over."""

    error: LineError


LineEvent = JobQueued | JobRejected | JobGone | JobToRetry | JobWasCancelled | JobEnded | RunEnded


class LineAction(Enum):
    """Action after a transition."""

    NOTHING = "nothing"
    POSTPONE = "wait, then queue the same job"
    RETRY = "wait, then queue the line under a new job id, since ids are used once"
    CLOSE = "keep the run's error, and wait for the job"
    RECORD = "record the outcome of the event"
    RECORD_RUN_ERROR = "record the run's error"


@dataclass(frozen=True, slots=True)
class _LineStep:
    """A transition of a line."""

    state: LineState
    action: LineAction


LINE_STEPS: Mapping[tuple[LineState, type[LineEvent]], _LineStep] = {
    (LineState.WAITING, JobQueued): _LineStep(LineState.QUEUED, LineAction.NOTHING),
    (LineState.WAITING, JobRejected): _LineStep(LineState.WAITING, LineAction.POSTPONE),
    (LineState.WAITING, RunEnded): _LineStep(LineState.ENDED, LineAction.RECORD),
    (LineState.QUEUED, JobGone): _LineStep(LineState.WAITING, LineAction.RETRY),
    (LineState.QUEUED, JobToRetry): _LineStep(LineState.WAITING, LineAction.RETRY),
    (LineState.QUEUED, JobWasCancelled): _LineStep(LineState.ENDED, LineAction.RECORD),
    (LineState.QUEUED, JobEnded): _LineStep(LineState.ENDED, LineAction.RECORD),
    (LineState.QUEUED, RunEnded): _LineStep(LineState.CLOSING, LineAction.CLOSE),
    (LineState.CLOSING, JobGone): _LineStep(LineState.ENDED, LineAction.RECORD_RUN_ERROR),
    (LineState.CLOSING, JobToRetry): _LineStep(LineState.ENDED, LineAction.RECORD_RUN_ERROR),
    (LineState.CLOSING, JobWasCancelled): _LineStep(LineState.ENDED, LineAction.RECORD_RUN_ERROR),
    (LineState.CLOSING, JobEnded): _LineStep(LineState.ENDED, LineAction.RECORD),
    (LineState.CLOSING, RunEnded): _LineStep(LineState.ENDED, LineAction.RECORD),
}


def line_step(state: LineState, event: LineEvent) -> _LineStep:
    """Return what follows an event of a line. Raises `UnexpectedEvent`."""
    if step := LINE_STEPS.get((state, type(event))):
        return step
    raise UnexpectedEvent(state, event)
