"""The events of an answer's jobs as server-sent events in OpenAI's form."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from sluice.cancellation import CancelOutcome
from sluice.contract.events import Event, Finished, Progress
from sluice.gateway import sse
from sluice.gateway.body import told
from sluice.gateway.errors import ApiError, openai_body
from sluice.gateway.tools import CustomCalls, RequestTools
from sluice.openai import Answer, usage_of
from sluice.streaming import LAST_SEQ

Events = Callable[[str], AsyncGenerator[Event]]  # the events of a job, from the first


async def answer_frames(
    job_ids: Sequence[str],
    events: Events,
    *,
    include_usage: bool,
    seen: Sequence[int] = (),
    tools: RequestTools | None = None,
    ignored: Sequence[str] = (),
) -> AsyncGenerator[bytes]:
    """Yield the frames of an answer with a choice for each job, without those of the events of each job up to `seen`.
    `tools`: of the request, for the calls of its custom ones; `ignored`: what was left out of it, for the first frame.

    The id of a frame is the position in each job's events. Raises as `Answer.chunks` and `Jobs.events` do.
    """
    seen = seen or [-1] * len(job_ids)
    position = list(seen)
    answers = [Answer(include_usage=include_usage, index=i, id=job_ids[0]) for i in range(len(job_ids))]
    calls = [CustomCalls(tools or RequestTools()) for _ in job_ids]
    finished: dict[int, Finished] = {}
    async with aclosing(interleaved([events(job_id) for job_id in job_ids])) as merged_events:
        async for index, event in merged_events:
            if isinstance(event, Progress) and not event.stored:
                yield sse.waiting(event)
                continue
            chunks = [calls[index].in_chunk(chunk) for chunk in answers[index].chunks(event)]
            if event.seq > seen[index]:
                position[index] = event.seq
                for chunk in chunks:  # one at most
                    yield sse.frame(told(chunk, ignored), id=_id(position))
                    ignored = ()
            if isinstance(event, Finished):
                finished[index] = event
    if include_usage:
        usage = total_usage([usage_of(finished[index].usage) for index in range(len(job_ids))])
        yield sse.frame(answers[0].usage_chunk(usage))
    yield sse.DONE


def _id(position: Sequence[int]) -> str:
    return ".".join(map(str, position))


def seen_by(last_event_id: str | None, jobs: int) -> list[int]:
    """Return the last event of each job that the client has, by its `Last-Event-ID`; -1 for none. Raises `ApiError` 400
    for an id that no frame of these jobs has."""
    if not last_event_id:
        return [-1] * jobs
    if not re.fullmatch(r"(?:-1|\d{1,16})(?:\.(?:-1|\d{1,16}))*", last_event_id, re.ASCII):
        raise sse.bad_last_event_id()
    seqs = [int(seq) for seq in last_event_id.split(".")]
    if len(seqs) != jobs or not 0 <= max(seqs) <= LAST_SEQ:
        raise sse.bad_last_event_id()
    return seqs


def error_frame(error: ApiError) -> bytes:
    """Return the last frame of a stream that failed; OpenAI clients raise it."""
    return sse.frame(openai_body(error))


T = TypeVar("T")


async def interleaved(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of all sources as they come, each with the index of its source.

    Raises the first error of a source. Closes all sources at the end.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]):
            async for only in sources[0]:
                yield 0, only
        return
    # A reader that has ended is itself the last item of its source.
    items = asyncio.Queue[tuple[int, T] | asyncio.Task[None]]()
    room = asyncio.Semaphore(64)  # items read ahead of a slow consumer
    readers = [asyncio.create_task(_read(index, source, items, room)) for index, source in enumerate(sources)]
    for reader in readers:
        reader.add_done_callback(items.put_nowait)
    try:
        running = len(readers)
        while running:
            item = await items.get()
            if isinstance(item, asyncio.Task):
                item.result()
                running -= 1
            else:
                room.release()
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    index: int,
    source: AsyncGenerator[T],
    items: "asyncio.Queue[tuple[int, T] | asyncio.Task[None]]",
    room: asyncio.Semaphore,
) -> None:
    async with aclosing(source):
        async for item in source:
            await room.acquire()
            items.put_nowait((index, item))


UsageFields = Mapping[str, Any]


def completion_of(results: Sequence[Mapping[str, Any]], tools: RequestTools | None = None) -> dict[str, Any]:
    """Return one completion with a choice for each result; one result is returned unchanged, but for the calls of
    custom tools."""
    if tools is not None and tools.targets:
        results = [_with_custom_calls(result, tools) for result in results]
    first = dict(results[0])
    if len(results) == 1:
        return first
    choices = [{**result["choices"][0], "index": index} for index, result in enumerate(results)]
    ours = {"choices": [result.get("sluice") for result in results]}
    return {**first, "choices": choices, "usage": total_usage([result["usage"] for result in results]), "sluice": ours}


def _with_custom_calls(result: Mapping[str, Any], tools: RequestTools) -> dict[str, Any]:
    (choice,) = result["choices"]
    return {**result, "choices": [{**choice, "message": CustomCalls(tools).in_message(choice["message"])}]}


def outcome_of(outcomes: Sequence[CancelOutcome]) -> CancelOutcome:
    """Return the outcome of cancelling all choices: "requested" while one runs, "ended" if all had ended before."""
    order: Sequence[CancelOutcome] = ("requested", "cancelled", "ended")
    return next(outcome for outcome in order if outcome in outcomes)


def total_usage(usages: Sequence[UsageFields]) -> dict[str, Any]:
    """Return the usage of all choices: the prompt's of the first, since it is the same, and the sum of the rest."""
    first = dict(usages[0])
    if len(usages) == 1:
        return first
    completion = sum(usage["completion_tokens"] for usage in usages)
    details = _sums([usage.get("completion_tokens_details") or {} for usage in usages])
    total = {"completion_tokens": completion, "total_tokens": first["prompt_tokens"] + completion}
    return {**first, **total, **({"completion_tokens_details": details} if details else {})}


def _sums(counts: Sequence[UsageFields]) -> dict[str, Any]:
    names = dict.fromkeys(name for each in counts for name in each)
    return {name: sum(each.get(name) or 0 for each in counts) for name in names}
