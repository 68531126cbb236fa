"""Validates a request and resolves its defaults against this worker's model."""

import hashlib
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from pydantic import ValidationError

from schemas import ChatRequest, explain, field_of
from schemas.base import MAX_VALUES as MOST_OBJECT_VALUES
from schemas.chat import NamedFunction, NamedTool, Tool
from schemas.messages import AssistantMessage, FunctionMessage, Message, ToolCall, ToolMessage
from worker.bounded_json.strict import MAX_BODY_VALUES, count_values
from worker.errors import JobFailure, prompt_too_large
from worker.request import Sampling


def with_tools(request: ChatRequest) -> ChatRequest:
    """Return the request with `functions`, `function_call` and the messages of that form as tools and tool calls."""
    tools = [Tool(type="function", function=function) for function in request.functions or ()]
    return request.model_copy(
        update={
            "tools": tools or request.tools,
            "tool_choice": request.tool_choice or _tool_choice(request.function_call),
            "functions": None,
            "function_call": None,
            "messages": _messages(request.messages),
        }
    )


def _tool_choice(choice: str | NamedFunction | None) -> str | NamedTool | None:
    return NamedTool(type="function", function=choice) if isinstance(choice, NamedFunction) else choice


def _messages(messages: list[Message]) -> list[Message]:
    """Translate messages. Without ids, a result belongs to the oldest call of its name that has no result yet."""
    unanswered: defaultdict[str, deque[str]] = defaultdict(deque)
    translated: list[Message] = []
    for place, message in enumerate(messages):
        call_id = f"function_{place}"
        match message:
            case AssistantMessage(function_call=call) if call is not None:
                unanswered[call.name].append(call_id)
                calls = [*(message.tool_calls or ()), ToolCall(id=call_id, function=call)]
                message = message.model_copy(update={"tool_calls": calls, "function_call": None})
            case FunctionMessage(name=name):
                answers = unanswered[name].popleft() if unanswered[name] else call_id
                message = ToolMessage(role="tool", content=message.content or "", tool_call_id=answers, name=name)
        translated.append(message)
    return translated


_OF_THE_MODEL = "temperature", "top_p", "top_k", "min_p"  # its generation config may have them


def read_request(
    body: Any, model_name: str, *, max_parts: int, alias: str = "", has_draft_model: bool = False
) -> ChatRequest:
    """Validate a job's body. `model_name`: the served model. `alias`: the name that the job was queued under, if that
    was an alias. `has_draft_model`: this worker has a draft model.

    Raises `JobFailure`, which names the field.
    """
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise JobFailure("invalid_request", explain(error), param=field_of(error)) from None
    except RecursionError:
        raise JobFailure("invalid_request", "The request is nested too deeply; flatten it.") from None
    refuse_other_model(request.model, model_name, alias)
    if not has_draft_model:
        _refuse_specprefill(request)
    _refuse_too_many(sum(map(_parts, request.messages)), max_parts)
    request = with_tools(request)
    _refuse_large_arguments(request.messages)
    return request


def refuse_other_model(named: str | None, served: str, alias: str) -> None:
    """Raise `JobFailure` if a request names another model than the served one. `alias`: as for `read_request`."""
    if named not in (None, served, alias or None):
        message = f"model: this queue serves {served!r}, not {named!r}."
        raise JobFailure("invalid_request", message, param="model")


def _refuse_specprefill(request: ChatRequest) -> None:
    """Refuse SpecPrefill fields on a worker without a draft model, instead of ignoring them silently."""
    wanted = {"specprefill": request.specprefill, "specprefill_keep_pct": request.specprefill_keep_pct}
    if named := [name for name, value in wanted.items() if value]:
        message = f"{', '.join(named)}: this worker has no draft model; leave it out."
        raise JobFailure("unsupported", message, param=named[0])


def _parts(message: Message) -> int:
    calls = message.tool_calls if isinstance(message, AssistantMessage) else None
    return (len(message.content) if isinstance(message.content, list) else 1) + len(calls or ())


def _refuse_too_many(parts: int, limit: int) -> None:
    if parts > limit:
        raise JobFailure(
            "too_large",
            f"messages: {parts:,} texts, images and tool calls are {parts - limit:,} more than this worker allows. "
            f"Please reduce the length of the messages to {limit:,}.",
            param="messages",
        )


def _refuse_large_arguments(messages: list[Message]) -> None:
    """Refuse too many JSON values in the arguments of earlier calls, which are parsed for the chat template."""
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
        if values > MOST_OBJECT_VALUES or total > MAX_BODY_VALUES:
            limits = f"{MOST_OBJECT_VALUES:,} a call and {MAX_BODY_VALUES:,} in a request"
            message = f"{where}: it holds {values:,} JSON values; send at most {limits}."
            raise JobFailure("too_large", message, param=where)


def output_tokens(
    request: ChatRequest, *, prompt: int, context: int, default: int | None, limit: int | None = None
) -> int:
    """Return the maximum length of the answer. All lengths are in tokens.

    `default`: of a request that states none; None: what the context leaves. `limit`: this worker's own limit. Raises
    `JobFailure` if the prompt leaves no space for an answer, or if the request asks for more than `limit`.
    """
    room = context - prompt
    if room < 1:
        raise prompt_too_large(prompt, context)
    asked = request.output_limit
    if asked and limit and asked > limit:
        raise JobFailure(
            "too_large",
            f"max_tokens: {asked:,} is {asked - limit:,} more than this worker allows; send at most {limit:,}.",
            param="max_tokens" if request.max_tokens else "max_completion_tokens",
        )
    return min(asked or default or room, limit or room, room)


def sampling_of(
    request: ChatRequest, generation: dict[str, Any], vocab: int, seed: int, ends: Collection[int] = ()
) -> Sampling:
    """Return the sampling parameters: those of the request by their names, else those of the model's generation config,
    else neutral ones.

    `ends`: the tokens that end an answer. Raises `JobFailure` for a biased token that is not in the vocabulary.
    """
    given = {each.name: getattr(request, each.name, None) for each in fields(Sampling)}
    given |= {name: generation.get(name) for name in _OF_THE_MODEL if given[name] is None}
    if request.temperature is None and generation.get("do_sample") is False:
        given["temperature"] = 0.0
    found = {name: value for name, value in given.items() if value is not None}
    return Sampling(**{"temperature": 1.0, **found, "logit_bias": _bias(request, vocab, ends), "seed": seed})


def _bias(request: ChatRequest, vocab: int, ends: Collection[int]) -> tuple[tuple[int, float], ...]:
    biases = {int(token): value for token, value in (request.logit_bias or {}).items()}
    if beyond := [token for token in biases if token >= vocab]:
        message = f"logit_bias: token {beyond[0]} is not in the vocabulary of {vocab:,}."
        raise JobFailure("invalid_request", message, param="logit_bias")
    never = dict.fromkeys(sorted(ends), -100.0) if request.ignore_eos else {}  # OpenAI's bias for a ban
    return tuple((biases | never).items())


def seed_of(request: ChatRequest, job_id: str) -> int:
    """Return the request's seed, or one derived from the job's id, so that all attempts sample the same tokens."""
    if request.seed is not None:
        return request.seed
    # Six bytes, since JavaScript clients can represent integers only up to 53 bits.
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=6).digest())
