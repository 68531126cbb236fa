"""Submits the jobs of a capture again, and finds the first difference between the recorded answer and the new one."""

import asyncio
import json
import math
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, Self

from sluice.capture.file import CapturedJob
from sluice.client import Client
from sluice.errors import CancelNotStored, NoWorker, SluiceError
from sluice.interfaces.embeddings import vectors_of

_LATE = "failed (deadline:"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a job returned. `ending`: its kind with the reason; None if it had not ended. `tokens` are empty if they are
    not known."""

    ending: str | None = None
    tokens: Sequence[int] = ()
    texts: tuple[str, str, str] = ("", "", "")  # reasoning, content and tool calls
    counted: int | None = None  # prompt tokens
    vectors: Sequence[Sequence[float]] = ()
    fingerprint: str = ""

    @property
    def is_whole(self) -> bool:
        """False for a job that had not ended, was cancelled, or reached its deadline: a new answer may go on."""
        return self.ending is not None and not self.ending.startswith(("cancelled", _LATE))

    @classmethod
    def of(cls, events: Sequence[dict[str, Any]], result: dict[str, Any] | None) -> Self:
        """Return the answer of a job by its events and its result, one of which may be absent. Raises ValueError,
        TypeError, KeyError, AttributeError or IndexError if no worker wrote them."""
        result = result or {}
        started = [index for index, each in enumerate(events) if each.get("type") in ("started", "restarted")]
        deltas = [each for each in events[started[-1] if started else 0 :] if each.get("type") == "delta"]
        begun = events[started[-1]] if started else {}
        answer = cls(
            ending=_ending([*events[-1:], result]),
            tokens=[int(token) for each in deltas for token in each.get("token_ids", ())],
            texts=_texts_of_message(result) if "choices" in result else _texts_of(deltas),
            fingerprint=str(begun.get("fingerprint") or result.get("system_fingerprint") or ""),
        )
        match result:
            case {"object": "token_count", "usage": {"prompt_tokens": int(count)}}:
                return replace(answer, counted=count)
            case {"object": "list", "data": [{"embedding": str()}, *_]}:
                return replace(answer, vectors=list(vectors_of(result)))
            case {"object": "list", "data": [*entries]}:
                return replace(answer, vectors=[each["embedding"] for each in entries])
        return answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the comparison of a job found, as a sentence."""

    verdict: Literal["equal", "differs", "skipped"]
    text: str
    id: str = ""  # of the job that was submitted


def compare(recorded: Answer, now: Answer) -> Outcome:
    """Compare answers. One that had not ended, or was cancelled, is compared as far as it was recorded."""
    difference = _first_difference(recorded, now)
    if difference is None and recorded.is_whole and recorded.ending != now.ending:
        difference = f"ended otherwise: recorded {recorded.ending}, now {now.ending}"
    if difference:
        is_other = recorded.fingerprint and now.fingerprint and recorded.fingerprint != now.fingerprint
        models = f"; another model or device: recorded {recorded.fingerprint}, now {now.fingerprint}"
        return Outcome("differs", f"{difference}{models if is_other else ''}")
    end = recorded.ending if recorded.is_whole else "as far as it was recorded"
    return Outcome("equal", f"{_extent(recorded)}, {end}")


def to_submit(job: CapturedJob, model: str | None) -> dict[str, Any] | str:
    """Return the request that repeats a job, with the seed that was drawn; or why there is none."""
    if job.request is None:
        return "its request was gone before it was recorded, or cannot be read"
    begun: list[dict[str, Any]] = [each for each in job.events if each.get("type") in ("started", "restarted")]
    request = dict(job.request)
    if job.function == "chat" and request.get("seed") is None and begun and isinstance(begun[-1].get("seed"), int):
        request["seed"] = begun[-1]["seed"]
    ending = _ending([*job.events[-1:], job.result or {}]) or ""
    if not ending.startswith("failed") or ending.startswith(_LATE):
        request.pop("deadline_s", None)  # an answer does not depend on it, unless it is refused for it
    if request.get("model") is not None:
        request["model"] = model or job.model
    return request


async def replay(client: Client, job: CapturedJob, request: dict[str, Any], model: str) -> Outcome:
    """Submit a job again and compare. A new job of one that had not ended is cancelled once it has as many tokens; so
    is one whose call here is cancelled. Raises `NoWorker`, and as `Client.submit` and `Client.stream`."""
    recorded = Answer.of(job.events, job.result)
    if model not in (served := await client.served_models()):
        raise NoWorker(model, sorted(served))
    lane: Literal["batch", "interactive"] = "batch" if job.lane == "batch" else "interactive"
    submitted = await client.submit(request, model=model, lane=lane, function=job.function, webhooks="none")
    try:
        events = await _events(client, submitted.id, math.inf if recorded.is_whole else max(1, len(recorded.tokens)))
    except asyncio.CancelledError:
        await _cancel(client, submitted.id)
        raise
    result = None
    if recorded.is_whole and events[-1]["type"] == "finished":
        with suppress(SluiceError):
            result = await client.result(submitted.id)
    return replace(compare(recorded, Answer.of(events, result)), id=submitted.id)


async def _events(client: Client, job_id: str, max_tokens: float) -> list[dict[str, Any]]:
    """Return the events of a job, which is cancelled when it has so many tokens."""
    events, tokens = list[dict[str, Any]](), 0
    async with aclosing(client.stream_json(job_id)) as stream:
        async for raw in stream:
            event = json.loads(raw)
            if event.get("workers") is None:  # of a worker, not of the reader
                events.append(event)
            before, tokens = tokens, tokens + len(event.get("token_ids", ()))
            if before < max_tokens <= tokens:
                await _cancel(client, job_id)
    return events


async def _cancel(client: Client, job_id: str) -> None:
    with suppress(CancelNotStored):  # the workers received the request
        await client.cancel(job_id)


def _ending(found: Sequence[dict[str, Any]]) -> str | None:
    """Return the kind of the end and its reason, of the last event or of the result."""
    for each in found:
        match each:
            case {"type": "finished", "finish_reason": reason}:
                return f"finished ({reason})"
            case {"choices": [{"finish_reason": reason}, *_]}:
                return f"finished ({reason})"
            case {"type": "failed", "error": {"type": kind, "message": message}}:
                return f"failed ({kind}: {message})"
            case {"type": "cancelled", "reason": reason}:
                return f"cancelled ({reason})"
            case {"object": "token_count" | "list"}:
                return "finished (stop)"
    return None


def _texts_of(deltas: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    calls = dict[int, list[str]]()
    for each in [call for delta in deltas for call in delta.get("tool_calls") or ()]:
        function = each.get("function") or {}
        call = calls.setdefault(each.get("index", 0), ["", ""])
        call[0] += function.get("name") or ""
        call[1] += function.get("arguments") or ""
    written = "\n".join(f"{name}({arguments})" for name, arguments in calls.values())
    reasoning, content = ("".join(each.get(part) or "" for each in deltas) for part in ("reasoning", "content"))
    return reasoning, content, written


def _texts_of_message(result: dict[str, Any]) -> tuple[str, str, str]:
    message = result["choices"][0]["message"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    written = "\n".join(f"{call['name']}({call['arguments']})" for call in calls)
    return (message.get("reasoning") or message.get("reasoning_content") or "", message.get("content") or "", written)


def _first_difference(recorded: Answer, now: Answer) -> str | None:
    found = list[str]()
    if (
        recorded.tokens
        and now.tokens
        and (at := _differ_at(recorded.tokens, now.tokens, recorded.is_whole)) is not None
    ):
        found.append(f"differs at token {at}")
    for part, was, became in zip(("reasoning", "text", "tool calls"), recorded.texts, now.texts, strict=True):
        if (at := _differ_at(was, became, recorded.is_whole)) is not None:
            found.append(f"{part} at character {at}: recorded {was[at : at + 30]!r}, now {became[at : at + 30]!r}")
            break
    if recorded.counted != now.counted and recorded.is_whole:
        found.append(f"recorded {recorded.counted} prompt tokens, now {now.counted}")
    found += _vectors_differ(recorded.vectors, now.vectors)
    return ", ".join(found) or None


def _differ_at(recorded: Sequence[Any], now: Sequence[Any], is_whole: bool) -> int | None:
    """Return the index of the first difference; None without one. Unless `is_whole`, more at the end is none."""
    for at, (was, became) in enumerate(zip(recorded, now, strict=False)):
        if was != became:
            return at
    shorter = min(len(recorded), len(now))
    return shorter if len(now) < len(recorded) or (is_whole and len(now) > len(recorded)) else None


def _vectors_differ(recorded: Sequence[Sequence[float]], now: Sequence[Sequence[float]]) -> list[str]:
    for row, (was, became) in enumerate(zip_longest(recorded, now, fillvalue=())):
        if len(was) != len(became):
            return [f"vector {row} has {len(was)} numbers recorded, now {len(became)}"]
        # Another batch or device rounds the numbers of unit vectors otherwise, in half precision.
        far = [at for at, (one, other) in enumerate(zip(was, became, strict=True)) if abs(one - other) > 1e-3]
        if far:
            return [f"vector {row} differs at number {far[0]}: recorded {was[far[0]]:g}, now {became[far[0]]:g}"]
    return []


def _extent(answer: Answer) -> str:
    if answer.counted is not None:
        return f"{answer.counted:,} prompt tokens"
    if answer.vectors:
        return f"{len(answer.vectors):,} vectors"
    return f"{len(answer.tokens):,} tokens" if answer.tokens else f"{sum(map(len, answer.texts)):,} characters"
