"""What earlier attempts at a job have delivered, so that a new one goes on after it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from worker.queue.scripts import loads
from worker.text.output import Output, Said, together


@dataclass(frozen=True, slots=True)
class Delivered:
    """Since an attempt last started over."""

    fingerprint: str  # of the model that said it
    seed: int
    tokens: tuple[int, ...]
    said: Said
    logprobs: tuple[dict[str, Any], ...] = ()


def delivered(log: Iterable[bytes]) -> Delivered | None:
    """None where no attempt has begun."""
    fingerprint, seed, deltas = "", 0, list[dict[str, Any]]()
    for event in map(loads, log):
        match event["type"]:
            case "started" | "restarted":
                fingerprint, seed = event["fingerprint"], event["seed"]
                deltas.clear()
            case "delta":
                deltas.append(event)
    if not fingerprint:
        return None
    tokens = tuple(token for delta in deltas for token in delta["token_ids"])
    logprobs = tuple(entry for delta in deltas for entry in delta.get("logprobs", ()))
    return Delivered(fingerprint, seed, tokens, together(map(_said, deltas)), logprobs)


def _said(delta: dict[str, Any]) -> Said:
    return Said(delta.get("content", ""), delta.get("reasoning", ""), tuple(delta.get("tool_calls", ())))


def replay(earlier: Delivered, output: Output) -> Literal["goes on", "has ended", "differs"]:
    """Bring a fresh `output` to where the earlier attempt's was, by the tokens that it delivered.

    "has ended": the answer's last words were let out, so the worker died between that and the final event.
    """
    said = together(map(output.feed, earlier.tokens))
    if said == earlier.said:
        return "has ended" if output.stopped else "goes on"
    said += output.flush("length")
    if said == earlier.said:
        return "has ended"
    return "has ended" if said + output.flush("stop") == earlier.said else "differs"
