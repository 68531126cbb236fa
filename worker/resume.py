"""What earlier attempts at a job have delivered, so that a new one goes on after it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from worker.queue.scripts import loads
from worker.text.output import Output


@dataclass(frozen=True, slots=True)
class Delivered:
    """Since an attempt last started over."""

    fingerprint: str  # of the model that said it
    seed: int
    tokens: tuple[int, ...]
    content: str


def delivered(log: Iterable[bytes]) -> Delivered | None:
    """None where no attempt has begun."""
    fingerprint, seed, tokens, content = "", 0, list[int](), list[str]()
    for event in map(loads, log):
        match event["type"]:
            case "started" | "restarted":
                fingerprint, seed = event["fingerprint"], event["seed"]
                tokens.clear()
                content.clear()
            case "delta":
                tokens += event["token_ids"]
                content.append(event.get("content", ""))
    return Delivered(fingerprint, seed, tuple(tokens), "".join(content)) if fingerprint else None


def replay(earlier: Delivered, output: Output) -> Literal["goes on", "has ended", "differs"]:
    """Bring a fresh `output` to where the earlier attempt's was, by the tokens that it delivered.

    "has ended": the answer's last text was let out, so the worker died between that and the final event.
    """
    text = "".join(map(output.feed, earlier.tokens))
    if text == earlier.content:
        return "has ended" if output.stopped else "goes on"
    return "has ended" if text + output.flush() == earlier.content else "differs"
