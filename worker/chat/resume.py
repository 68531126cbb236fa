"""What earlier attempts at a job have delivered, so that a new one goes on after it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from worker.bounded_json.strict import loads
from worker.json_bytes import dumps
from worker.text.output.output import Output, OutputDelta, together
from worker.text.threads import Check, never

_ENDINGS: tuple[Literal["length", "stop"], ...] = ("length", "stop")


@dataclass(frozen=True, slots=True)
class Delivered:
    """Since an attempt last started over."""

    fingerprint: str  # of the model that said it
    seed: int
    tokens: tuple[int, ...]
    said: OutputDelta
    logprobs: tuple[bytes, ...] = ()  # an entry a token, as JSON


def taken_up(
    log: Iterable[bytes], model: tuple[str, int] | None, afresh: Callable[[], Output], check: Check = never
) -> tuple[Delivered | None, "Replayed | None"]:
    """Read what was delivered, and replay it if it is of this model: its fingerprint and the seed. An answer may be
    long, so the check is called between tokens."""
    earlier = delivered(log, check)
    if earlier is None or (earlier.fingerprint, earlier.seed) != model:
        return earlier, None
    return earlier, replay(earlier, afresh, check)


def delivered(log: Iterable[bytes], check: Check = never) -> Delivered | None:
    """None where no attempt has begun."""
    fingerprint, seed, tokens, said, logprobs = "", 0, list[int](), list[OutputDelta](), list[bytes]()
    for event in map(loads, log):
        check()
        match event["type"]:
            case "started" | "restarted":
                fingerprint, seed = event["fingerprint"], event["seed"]
                for gathered in (tokens, said, logprobs):
                    gathered.clear()
            case "delta":
                tokens += event["token_ids"]
                said.append(_said(event))
                logprobs += map(dumps, event.get("logprobs", ()))  # see `Items`
    if not fingerprint:
        return None
    return Delivered(fingerprint, seed, tuple(tokens), together(said), tuple(logprobs))


def _said(delta: dict[str, Any]) -> OutputDelta:
    return OutputDelta(delta.get("content", ""), delta.get("reasoning", ""), tuple(delta.get("tool_calls", ())))


@dataclass(frozen=True, slots=True)
class Replayed:
    output: Output  # where the earlier attempt's was
    # Its last words were let out: the worker died between that and the final event.
    ended: bool


def replay(earlier: Delivered, afresh: Callable[[], Output], check: Check = never) -> Replayed | None:
    """By the tokens that were delivered. None where they say something else now."""

    def fed(output: Output) -> Iterator[OutputDelta]:
        for token in earlier.tokens:
            check()
            yield output.feed(token)

    output = afresh()
    if together(fed(output)) == earlier.said:
        return Replayed(output, ended=output.stopped)
    for ending in _ENDINGS:
        output = afresh()
        if together([*fed(output), output.flush(ending)]) == earlier.said:
            return Replayed(output, ended=True)
    return None
