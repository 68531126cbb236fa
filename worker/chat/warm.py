"""Prompts that are computed before a job needs them: system prompts and conversations from a file.

They run through the engine one after the other, in the offline lane, so that they delay no job. What they leave in the
prefix cache is written to disk, if prefixes are stored there, and pinned."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from sluice.contract.keys import Lane
from worker.chat.context import WorkerContext
from worker.chat.prepare import cache_namespace
from worker.chat.request import read_request
from worker.errors import JobFailure, prompt_too_large
from worker.outcomes import NotStored, Outcome, Prefilled, Refused, RowFailed, Sampled, StoreResult
from worker.request import GenerationRequest

logger = logging.getLogger("sluice.warm")

_LANE: Lane = "batch"
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
    dict: "an object without a list of messages",
}
# Templates refuse a conversation without a user's turn. What two of these have in common is what all share.
_QUESTIONS = ("…", "Hello")

WarmBody = dict[str, Any]  # of a request
# Writes the cached prefix of a namespace's tokens to disk; waits until it is written, or refused.
StorePrefix = Callable[[str, tuple[int, ...]], Awaitable[StoreResult]]


class BadWarmFile(Exception):
    """The file cannot be read, or has no conversations. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """The result for one conversation of the file."""

    number: int  # from 1
    tokens: int = 0  # of the prefix that was computed
    cached: int = 0  # of these, found in memory or on disk
    stored: StoreResult | None = None  # on disk; None if nothing was computed
    problem: str = ""  # why nothing was computed; empty if it was

    @property
    def left_out(self) -> bool:
        """True if nothing was computed, or if neither memory nor disk has kept it."""
        missing = self.stored.missing if self.stored else None
        return bool(self.problem) or missing in (NotStored.TOO_SHORT, NotStored.NOT_CACHED)

    @property
    def missing(self) -> str:
        """Why the prefix, or its end, is not on disk; empty if all of it is."""
        if self.stored is None:
            return self.problem
        return self.stored.missing.value if self.stored.missing else ""


def read_conversations(path: Path) -> list[WarmBody]:
    """Read the file, and return a request body for each conversation. Blocks. Raises `BadWarmFile`."""
    try:
        content = json.loads(path.expanduser().read_bytes())
    except OSError as error:
        raise BadWarmFile(f"{error.strerror}; give a file that can be read.") from None
    except (ValueError, RecursionError):
        raise BadWarmFile("it is not JSON; give a list of messages, or of conversations.") from None
    if isinstance(content, dict) or _are_messages(content):
        content = [content]
    if not isinstance(content, list) or not content:
        raise BadWarmFile("it has no conversations; give a list of messages, or of conversations.")
    return [_body(number, each) for number, each in enumerate(content, start=1)]


def _are_messages(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(each, dict) and "role" in each for each in content)


def _body(number: int, conversation: Any) -> WarmBody:
    match conversation:
        case str():
            return {"messages": [{"role": "system", "content": conversation}]}
        case list():
            return {"messages": conversation}
        case {"messages": list()}:
            return dict(conversation)
    form = "a text, a list of messages, or a request with messages"
    kind = _KINDS.get(type(conversation), "of another kind")
    raise BadWarmFile(f"conversation {number} is {kind}; give {form}.")


async def warm_prompts(context: WorkerContext, store: StorePrefix, bodies: Sequence[WarmBody]) -> AsyncIterator[Warmed]:
    """Compute the prompts of these requests one after the other, and store their prefixes. Yields a result for each."""
    for number, body in enumerate(bodies, start=1):
        try:
            yield await _warm_one(context, store, number, body)
        except JobFailure as failure:
            yield Warmed(number, problem=failure.message)


async def warm_and_log(context: WorkerContext, store: StorePrefix, bodies: Sequence[WarmBody]) -> None:
    """Compute and store the prompts of these requests, and log what cannot be computed."""
    began = asyncio.get_running_loop().time()
    results = list[Warmed]()
    async for result in warm_prompts(context, store, bodies):
        results.append(result)
        _log_problem(result)
    logger.info(
        "warmed %d of %d conversations in %.1f s: %d tokens, %d of them found; %d are on disk",
        sum(not each.left_out for each in results), len(results), asyncio.get_running_loop().time() - began,
        sum(each.tokens for each in results), sum(each.cached for each in results),
        sum(each.stored.tokens for each in results if each.stored),
    )  # fmt: skip


def _log_problem(result: Warmed) -> None:
    if result.problem:
        logger.warning("SLUICE_PREFIX_WARM: conversation %d is left out: %s", result.number, result.problem)
    elif result.stored and result.stored.missing and result.stored.missing is not NotStored.NO_FOLDER:
        logger.warning(
            "SLUICE_PREFIX_WARM: conversation %d: %d of %d tokens are on disk: %s",
            result.number, result.stored.tokens, result.tokens, result.missing,
        )  # fmt: skip


async def _warm_one(context: WorkerContext, store: StorePrefix, number: int, body: WarmBody) -> Warmed:
    """Raises `JobFailure`."""
    request = await _generation_request(context, number, body)
    row = _Row()
    context.engine.submit(request, row.on_outcome)
    try:
        await row.ended
    finally:
        context.engine.remove(request.id)
    prefix = request.prompt[:-1]  # the last token is computed with the answer
    stored = await store(request.namespace, prefix)
    return Warmed(number, len(prefix), row.cached, stored)


async def _generation_request(context: WorkerContext, number: int, body: WarmBody) -> GenerationRequest:
    bodies = [*_complete(body)]
    prompts = [await _prompt(context, each) for each in bodies]
    tokens, boundaries, namespace = prompts[0]
    if len(prompts) > 1:
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, prompts[1][0], strict=False)))
        tokens = tokens[: shared + 1]
        boundaries = (shared, *(boundary for boundary in boundaries if boundary < shared))
    if len(tokens) >= context.context_tokens:
        raise prompt_too_large(len(tokens), context.context_tokens)
    # Ids of jobs have no space.
    return GenerationRequest(f"warm {number}", tokens, 1, lane=_LANE, namespace=namespace, boundaries=boundaries)


def _complete(body: WarmBody) -> Iterator[WarmBody]:
    """Yield the request; or if it has no user's turn, the request with different ones."""
    messages = body["messages"]
    if any(isinstance(message, dict) and message.get("role") == "user" for message in messages):
        yield body
        return
    for question in _QUESTIONS:
        yield {**body, "messages": [*messages, {"role": "user", "content": question}]}


async def _prompt(context: WorkerContext, body: WarmBody) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Return the tokens of a request's prompt, its boundaries and its namespace. Raises `JobFailure`."""
    settings = context.settings
    request = await asyncio.to_thread(read_request, body, settings.model_name, max_parts=settings.max_content_parts)
    if any(isinstance(message.content, list) and _has_image(message.content) for message in request.messages):
        raise JobFailure("unsupported", "messages: images cannot be warmed; leave them out.")
    prompt = await context.codec.prompt(request, (), _LANE)
    return tuple(prompt.tokens), tuple(prompt.boundaries), cache_namespace(request, context)


def _has_image(parts: Sequence[Any]) -> bool:
    return any(part.type != "text" for part in parts)


class _Row:
    """Waits for the end of a row."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cached = 0

    def on_outcome(self, outcome: Outcome, rows: int) -> None:
        """Process one outcome of the engine, on the event loop."""
        if self.ended.done():
            return
        match outcome:
            case Prefilled(cached=cached):
                self.cached = cached
            case Sampled(finish_reason=reason) if reason:
                self.ended.set_result(None)
            case Refused(message=message):
                self.ended.set_exception(JobFailure("too_large", message))
            case RowFailed():
                self.ended.set_exception(JobFailure("internal", "The engine failed on it; the log says why."))
