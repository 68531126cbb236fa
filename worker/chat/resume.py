"""Reads the output that earlier attempts at a job delivered, so that a new attempt continues it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.base import Sent
from worker.bounded_json.strict import loads
from worker.json_bytes import dumps
from worker.text.output.output import Output, OutputDelta, concat
from worker.text.threads import Check, never

_ENDINGS: tuple[Literal["length", "stop"], ...] = ("length", "stop")


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


# Result for a log that no worker wrote: it is unknown which output its subscribers received.
_UNREADABLE = Delivered("", 0, (), OutputDelta())


def read_and_replay(
    log: Iterable[bytes],
    model: tuple[str, int] | None,
    new_output: Callable[[], Output],
    vocab: int,
    check: Check = never,
) -> tuple[Delivered | None, "Replayed | None"]:
    """Read the delivered output, and replay it if fingerprint and seed equal `model`. A log with a token that is not in
    the vocabulary is not replayed, since the engine would index its embeddings by it. An answer may be long, so `check`
    is called between tokens."""
    try:
        earlier = delivered(log, check)
    except (ValueError, RecursionError):
        return _UNREADABLE, None
    if earlier is None or (earlier.fingerprint, earlier.seed) != model or max(earlier.tokens, default=0) >= vocab:
        return earlier, None
    return earlier, replay(earlier, new_output, check)


def delivered(log: Iterable[bytes], check: Check = never) -> Delivered | None:
    """Return the delivered output; None if no attempt has begun. Raises ValueError for a log that no worker wrote."""
    fingerprint, seed, tokens, outputs, logprobs = "", 0, list[int](), list[OutputDelta](), list[bytes]()
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
                _Delta.model_validate(event)
                tokens += event["token_ids"]
                outputs.append(_output_of(event))
                logprobs += map(dumps, event.get("logprobs", ()))  # see `Items`
    if not fingerprint:
        return None
    return Delivered(fingerprint, seed, tuple(tokens), concat(outputs), tuple(logprobs))


def _output_of(delta: dict[str, Any]) -> OutputDelta:
    return OutputDelta(delta.get("content", ""), delta.get("reasoning", ""), tuple(delta.get("tool_calls", ())))


@dataclass(frozen=True, slots=True)
class Replayed:
    """The output parser after the delivered tokens."""

    output: Output  # in the state that it had in the earlier attempt
    # True if the answer was complete: the worker died before it wrote the final event.
    ended: bool


def replay(earlier: Delivered, new_output: Callable[[], Output], check: Check = never) -> Replayed | None:
    """Replay the delivered tokens. Returns None if they yield another text than was delivered."""

    def fed(output: Output) -> Iterator[OutputDelta]:
        for token in earlier.tokens:
            check()
            yield output.feed(token)

    output = new_output()
    if concat(fed(output)) == earlier.output:
        return Replayed(output, ended=output.stopped)
    for ending in _ENDINGS:
        output = new_output()
        if concat([*fed(output), output.flush(ending)]) == earlier.output:
            return Replayed(output, ended=True)
    return None
