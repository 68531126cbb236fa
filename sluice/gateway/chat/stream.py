"""The events of an answer's jobs as server-sent events in OpenAI's form."""

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from sluice.gateway import sse
from sluice.gateway.chat.answer import total_usage
from sluice.gateway.chat.merging import merged
from sluice.gateway.errors import ApiError, openai_body
from sluice.openai import Answer, usage_of
from sluice.streaming.streams import LAST_SEQ
from sluice.wire import Event, Finished, Progress

Events = Callable[[str], AsyncGenerator[Event]]  # the events of a job, from the first


async def frames(
    job_ids: Sequence[str],
    events: Events,
    *,
    include_usage: bool,
    seen: Sequence[int],
) -> AsyncGenerator[bytes]:
    """Yield the frames of an answer with a choice for each job, without those of the events up to `seen`.

    The id of a frame is the position in each job's events. Raises as `Answer.chunks` and `Jobs.events` do.
    """
    position = list(seen)
    answers = [Answer(include_usage=include_usage, index=i, id=job_ids[0]) for i in range(len(job_ids))]
    finished: dict[int, Finished] = {}
    async with aclosing(merged([events(job_id) for job_id in job_ids])) as merged_events:
        async for index, event in merged_events:
            if isinstance(event, Progress) and not event.stored:
                yield sse.waiting(event)
                continue
            chunks = answers[index].chunks(event)
            if event.seq > seen[index]:
                position[index] = event.seq
                for chunk in chunks:  # one at most
                    yield sse.frame(chunk, id=_id(position))
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
