"""From what was sent to what will run: read, refused or resolved against this worker's model."""

import hashlib
from typing import Any

from pydantic import ValidationError

from schemas import ChatRequest, explain
from schemas.base import MOST_VALUES as MOST_OBJECT_VALUES
from schemas.messages import AssistantMessage, Message
from worker.errors import Refusal, prompt_too_large
from worker.functions import with_tools
from worker.reading.size import MOST_VALUES, count_values
from worker.schedule.sequence import Sampling


def read_request(body: Any, served: str, *, max_parts: int, drafted: bool = False) -> ChatRequest:
    """`drafted`: this worker has a draft model. Raises `Refusal` with a sentence that names the field."""
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise Refusal("invalid_request", explain(error)) from None
    except RecursionError:
        raise Refusal("invalid_request", "The request is nested too deeply.") from None
    if request.model not in (None, served):
        raise Refusal("invalid_request", f"model: this queue serves {served!r}, not {request.model!r}.")
    if not drafted:
        _refuse_thinning(request)
    _refuse_too_many(sum(map(_parts, request.messages)), max_parts)
    request = with_tools(request)
    _refuse_large_arguments(request.messages)
    return request


def _refuse_thinning(request: ChatRequest) -> None:
    """Nothing is silently ignored."""
    wanted = {"specprefill": request.specprefill, "specprefill_keep_pct": request.specprefill_keep_pct}
    if named := [name for name, value in wanted.items() if value]:
        raise Refusal("unsupported", f"{', '.join(named)}: this worker has no draft model; leave it out.")


def _parts(message: Message) -> int:
    calls = message.tool_calls if isinstance(message, AssistantMessage) else None
    return (len(message.content) if isinstance(message.content, list) else 1) + len(calls or ())


def _refuse_too_many(parts: int, most: int) -> None:
    if parts > most:
        raise Refusal(
            "too_large",
            f"messages: {parts:,} texts, images and tool calls are {parts - most:,} more than this worker takes, "
            f"{most:,}.",
        )


def _refuse_large_arguments(messages: list[Message]) -> None:
    """Arguments of earlier calls are JSON inside of a string, and are read for the chat template."""
    written = {
        f"messages[{place}].tool_calls[{index}].function.arguments": call.function.arguments
        for place, message in enumerate(messages)
        if isinstance(message, AssistantMessage)
        for index, call in enumerate(message.tool_calls or ())
    }
    if sum(text.count(",") + text.count("[") + text.count("{") for text in written.values()) <= MOST_OBJECT_VALUES:
        return
    total = 0
    for where, text in written.items():
        values = count_values(text.encode())
        total += values
        if values > MOST_OBJECT_VALUES or total > MOST_VALUES:
            most = f"{MOST_OBJECT_VALUES:,} a call and {MOST_VALUES:,} in a request"
            raise Refusal("too_large", f"{where}: it holds {values:,} JSON values; send at most {most}.")


def output_tokens(request: ChatRequest, *, prompt: int, context: int, default: int, most: int | None = None) -> int:
    """How long the answer may be. Raises `Refusal` when the prompt leaves no room for one, or when more is asked
    for than `most`, this worker's own limit."""
    room = context - prompt
    if room < 1:
        raise prompt_too_large(prompt, context)
    asked = request.output_limit
    if asked and most and asked > most:
        raise Refusal(
            "too_large", f"max_tokens: {asked:,} is {asked - most:,} more than this worker gives, {most:,} at the most."
        )
    return min(asked or default, most or room, room)


def sampling_of(request: ChatRequest, generation: dict[str, Any], vocab: int, seed: int) -> Sampling:
    """The request's wishes, else the model's generation config, else plain sampling."""

    def wish(name: str, otherwise: Any) -> Any:
        asked = getattr(request, name)
        return asked if asked is not None else generation.get(name) or otherwise

    temperature = wish("temperature", 1.0)
    if request.temperature is None and (generation.get("do_sample") is False or generation.get("temperature") == 0):
        temperature = 0.0
    return Sampling(
        temperature=temperature,
        top_p=wish("top_p", 1.0),
        top_k=wish("top_k", 0),
        min_p=wish("min_p", 0.0),
        repetition_penalty=request.repetition_penalty or 1.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_bias(request.logit_bias or {}, vocab),
        seed=seed,
    )


def _bias(wanted: dict[str, float], vocab: int) -> tuple[tuple[int, float], ...]:
    pairs = tuple((int(token), value) for token, value in wanted.items())
    if beyond := [token for token, _ in pairs if token >= vocab]:
        raise Refusal("invalid_request", f"logit_bias: token {beyond[0]} is not in the vocabulary of {vocab:,}.")
    return pairs


def seed_of(request: ChatRequest, job_id: str) -> int:
    """The request's, else one drawn from the job's id: every attempt at the job then draws the same tokens."""
    if request.seed is not None:
        return request.seed
    # Six bytes, since a client in JavaScript has 53 bits to report it back with.
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=6).digest())
