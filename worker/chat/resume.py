"""Decides how an attempt at a job begins: it starts, or it continues the output that earlier attempts delivered."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.base import Sent
from worker.bounded_json.strict import loads
from worker.chat.specprefill import applies_to
from worker.json_bytes import dumps
from worker.queue.job.resume_state import ResumeState
from worker.text.output.output import Output, OutputDelta, concat
from worker.text.threads import Check, never

# Where both yield what was delivered, "stop" counts: it tells if the last call is complete, which "length" need not.
_ENDINGS: tuple[Literal["stop", "length"], ...] = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Delivered:
    """Output delivered since an attempt last started over."""

    fingerprint: str  # fingerprint of the model that generated it
    seed: int
    tokens: tuple[int, ...]
    output: OutputDelta
    logprobs: tuple[bytes, ...] = ()  # one entry per token, as JSON


class _AttemptBegins(Sent):
    fingerprint: str
    seed: int


class _Function(Sent):
    arguments: str


class _ToolCall(Sent):
    index: int
    function: _Function


class _Delta(Sent):
    token_ids: list[Annotated[int, Field(ge=0)]]
    content: str = ""
    reasoning: str = ""
    tool_calls: list[_ToolCall] = Field(default_factory=list)
    logprobs: list[dict[str, Any]] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Start:
    """No attempt has begun an answer."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The answer continues after the delivered output."""

    delivered: Delivered
    output: Output  # the parser after the delivered tokens
    ended: bool  # the answer was complete: the worker died before it wrote the final event
    state: ResumeState  # what this attempt leaves: the decisions of the earlier one stay


@dataclass(frozen=True, slots=True)
class Restart:
    """The delivered output cannot be continued, so the answer begins again."""

    reason: str  # for the log


def resume_plan(
    log: Iterable[bytes],
    left: ResumeState | None,
    new: ResumeState,
    new_output: Callable[[], Output],
    check: Check = never,
    *,
    prompt_tokens: int,
    vocab_size: int,
) -> Start | Resume | Restart:
    """Decide how an attempt begins, by the events and the state that earlier attempts left; `left` is None if the state
    cannot be read. `new`: the state that this attempt leaves if it starts. To continue an answer, its tokens are
    replayed. It may be long, so `check` is called between tokens."""
    try:
        earlier = delivered(log, check)
    except (ValueError, RecursionError):
        return Restart("its log holds an event that no worker wrote")
    if earlier is None:
        return Start()
    if left is None:
        return Restart("its state holds a value that no worker wrote")
    if obstacle := _obstacle(earlier, left, new, prompt_tokens, vocab_size):
        return Restart(obstacle)
    replayed = replay(earlier, new_output, check)
    if replayed is None:
        return Restart("its tokens yield another text on this worker")
    return Resume(earlier, *replayed, new.model_copy(update={"specprefill": left.specprefill}))


def _obstacle(earlier: Delivered, left: ResumeState, new: ResumeState, prompt_tokens: int, vocab_size: int) -> str:
    """Return why the delivered tokens cannot be continued; empty if they can."""
    if (earlier.fingerprint, earlier.seed) != (new.fingerprint, new.seed):
        return "it began with another model or seed"
    if left.images != new.images:
        return "its images have changed"
    if left.specprefill and not applies_to(left.specprefill, new.fingerprint, prompt_tokens):
        return "it is unknown which tokens of its prompt were dropped"
    if max(earlier.tokens, default=0) >= vocab_size:  # the engine would index its embeddings by it
        return "its log holds a token that is not in the vocabulary"
    return ""


def delivered(log: Iterable[bytes], check: Check = never) -> Delivered | None:
    """Return the delivered output; None if no attempt has begun. Raises ValueError for a log that no worker wrote."""
    fingerprint = ""
    seed = 0
    tokens = list[int]()
    outputs = list[OutputDelta]()
    logprobs = list[bytes]()
    for event in map(loads, log):
        check()
        if not isinstance(event, dict):
            raise ValueError("An event is an object.")
        match event.get("type"):
            case "started" | "restarted":
                _AttemptBegins.model_validate(event)
                fingerprint, seed = event["fingerprint"], event["seed"]
                for gathered in (tokens, outputs, logprobs):
                    gathered.clear()
            case "delta":
                delta = _Delta.model_validate(event)
                tokens += delta.token_ids
                outputs.append(OutputDelta(delta.content, delta.reasoning, tuple(event.get("tool_calls", ()))))
                logprobs += map(dumps, event.get("logprobs", ()))  # see `Items`
    if not fingerprint:
        return None
    return Delivered(fingerprint, seed, tuple(tokens), concat(outputs), tuple(logprobs))


def replay(earlier: Delivered, new_output: Callable[[], Output], check: Check = never) -> tuple[Output, bool] | None:
    """Replay the delivered tokens. Returns the output parser after them, and True if the answer was complete; None if
    they yield another text than was delivered."""

    def fed(output: Output) -> Iterator[OutputDelta]:
        for token in earlier.tokens:
            check()
            yield output.feed(token)

    output = new_output()
    if concat(fed(output)) == earlier.output:
        return output, output.stopped
    for ending in _ENDINGS:
        output = new_output()
        if concat([*fed(output), output.flush(ending)]) == earlier.output:
            return output, True
    return None
