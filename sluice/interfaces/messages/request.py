"""Translates the body of Anthropic's Messages to a request of the contract."""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sluice.contract.keys import TENANT_CHARACTERS
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError
from sluice.interfaces.messages.body import (
    AssistantTurn,
    CountBody,
    CustomTool,
    HostedTool,
    Message,
    MessagesBody,
    OfferedTool,
    ResultBlock,
    SystemBlock,
    SystemTurn,
    ThinkingOption,
    ToolChoiceOption,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
    validate,
)

logger = logging.getLogger("sluice.gateway")

TranslatedPart = dict[str, Any]

# Claude Code's first line of `system`: it says nothing to a model, and differs in each conversation, so that no two
# would have a common beginning.
_ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:.*(\n+|\Z)")


def prompt_fields(body: CountBody) -> dict[str, Any]:
    """Return the part of the contract's request that the prompt depends on. Raises `ApiError`."""
    if body.context_management:
        logger.info("context_management is accepted and no edit is made: the whole history is the prompt")
    instructions = _ATTRIBUTION.sub("", _text(body.system)) if body.system else ""
    system = [{"role": "system", "content": instructions}] if instructions else []
    return {
        "model": body.model,
        "messages": [*system, *(each for message in _shown(body.messages) for each in _messages(message))],
        **tool_fields(body),
        **_thinking(body.thinking),
        **_output(body),
    }


def read_message(content: dict[str, Any]) -> tuple[MessagesBody, dict[str, Any]]:
    """Return the body of a request for a message, and the contract's request for it. Raises `ApiError`."""
    body = validate(MessagesBody, content)
    return body, chat_request(body)


def chat_request(body: MessagesBody) -> dict[str, Any]:
    """Return the contract's request for a body. Raises `ApiError`."""
    sampling = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences}
    others = {
        "max_tokens": body.max_tokens,
        "user": _user(body.metadata.user_id) if body.metadata else None,
        "service_tier": "default" if body.service_tier == "standard_only" else body.service_tier,
    }
    optional = {name: value for name, value in {**sampling, **others}.items() if value is not None}
    return {**prompt_fields(body), **optional}


def _user(user_id: str | None) -> str | None:
    """Return the id of the user, or its hash if the contract has no space for it."""
    if user_id is None or len(user_id) <= TENANT_CHARACTERS:
        return user_id
    return hashlib.sha256(user_id.encode()).hexdigest()


def _thinking(thinking: ThinkingOption | None) -> dict[str, Any]:
    """Return the budget, and the variables that chat templates read; other templates ignore them. Without `thinking`
    the template decides."""
    if thinking is None:
        return {}
    is_on = thinking.type != "disabled"
    budget = {"max_reasoning_tokens": thinking.budget_tokens} if thinking.type == "enabled" else {}
    return {"chat_template_kwargs": {"enable_thinking": is_on, "thinking": is_on}, **budget}


def _output(body: CountBody) -> dict[str, Any]:
    config = body.output_config
    later = [message.output_config for message in body.messages if isinstance(message, SystemTurn)]
    efforts = [each.effort for each in (config, *later) if each and each.effort]
    effort = {"reasoning_effort": efforts[-1]} if efforts else {}
    wanted = (config.format if config else None) or body.output_format
    if wanted is None:
        return effort
    schema = {"name": "output", "schema": wanted.json_schema}
    return {**effort, "response_format": {"type": "json_schema", "json_schema": schema}}


def _messages(message: Message) -> list[dict[str, Any]]:
    match message:
        case UserTurn(content=str(text)):
            return [{"role": "user", "content": text}]
        case UserTurn():
            return _user_messages(message)
        case AssistantTurn():
            return [_assistant_message(message)]
        case SystemTurn(content=content):
            text = _text(content)
            return [{"role": "system", "content": text}] if text else []
    raise AssertionError(message)


def _shown(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without those that were to be cleared at a later message of the user."""
    last = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
    return [
        message
        for at, message in enumerate(messages)
        if not (isinstance(message, SystemTurn) and message.clear_at == "next_user_message" and at < last)
    ]


def _user_messages(message: UserTurn) -> list[dict[str, Any]]:
    """Return the tool results, each as a message, and then the rest as one. The contract's tool messages are text, so
    the images of results follow in the user's message."""
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    parts = [part for result in results for part in _result_images(result)]
    parts += [_part(block) for block in message.content if not isinstance(block, ToolResultBlock | str)]
    user = [{"role": "user", "content": parts}] if parts else []
    return [*map(_tool_message, results), *user]


def _tool_message(result: ToolResultBlock) -> dict[str, Any]:
    blocks = [result.content] if isinstance(result.content, str) else result.content or []
    texts = [
        block if isinstance(block, str) else _part(block)["text"]
        for block in blocks
        if isinstance(block, str) or block.type != "image"
    ]
    text = "\n".join(texts)
    return {
        "role": "tool",
        "tool_call_id": result.tool_use_id,
        "content": f"Error: {text}" if result.is_error else text,
    }


def _result_images(result: ToolResultBlock) -> list[TranslatedPart]:
    images = [block for block in result.content or () if not isinstance(block, str) and block.type == "image"]
    label = [{"type": "text", "text": f"The images of the result {result.tool_use_id}:"}] if images else []
    return [*label, *map(_part, images)]


def _part(block: ResultBlock) -> TranslatedPart:
    match block.type:
        case "text":
            return {"type": "text", "text": block.text}
        case "document":
            heads = [head for head in (block.title, block.context) if head]
            return {"type": "text", "text": "\n\n".join([*heads, block.source.data])}
        case "image":
            source = block.source
            url = f"data:{source.media_type};base64,{source.data}" if source.type == "base64" else source.url
            return {"type": "image_url", "image_url": {"url": url}}


def _assistant_message(message: AssistantTurn) -> dict[str, Any]:
    """Return an earlier answer. Redacted thinking is dropped: only Anthropic can read it."""
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    text = "".join(block.text for block in message.content if block.type == "text")
    reasoning = "\n\n".join(block.thinking for block in message.content if block.type == "thinking")
    calls = [_call(block) for block in message.content if block.type == "tool_use"]
    return {
        "role": "assistant",
        "content": None if calls and not text else text,
        **({"reasoning": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text(content: str | Sequence[SystemBlock]) -> str:
    return content if isinstance(content, str) else "\n\n".join(map(_told, content))


def _told(block: SystemBlock) -> str:
    """Return the text of a block. Tools stay where the prompt begins with them: what changes is told here, so that the
    prompt continues the former one."""
    match block.type:
        case "text":
            return block.text
        case "tool_addition":
            tool = block.tool
            name = tool.name if tool.type == "tool_reference" else _name(tool.definition)
            return f"The tool {name} is available from here on."
        case "tool_removal":
            return f"The tool {block.tool.name} is not available any more."


def _name(tool: OfferedTool) -> str:
    return tool.title if isinstance(tool, HostedTool) else tool.name


def tool_fields(body: CountBody) -> dict[str, Any]:
    """Return the request's `tools`, `tool_choice` and `parallel_tool_calls`.

    Tools that Anthropic defines are left out, with one line in the log; raises `ApiError` if one of them is forced.
    """
    added = {_name(tool): tool for tool in _added_tools(body.messages)}
    tools = [*(tool for tool in body.tools or () if _name(tool) not in added), *added.values()]
    hosted = [tool.title for tool in tools if isinstance(tool, HostedTool)]
    custom = [tool for tool in tools if isinstance(tool, CustomTool)]
    _check_choice(body.tool_choice, custom, hosted)
    if hosted:
        logger.info("left out tools that only Anthropic's servers have: %s", ascii(", ".join(hosted))[:500])
    if not custom:
        return {}
    return {"tools": [_function(tool) for tool in custom], **_choice(body.tool_choice)}


def _added_tools(messages: Sequence[Message]) -> Iterator[OfferedTool]:
    """Yield the tools that are defined within the conversation."""
    for message in messages:
        if not isinstance(message, SystemTurn) or isinstance(message.content, str):
            continue
        for block in message.content:
            if block.type == "tool_addition" and block.tool.type == "tool_definition":
                yield block.tool.definition


def _check_choice(choice: ToolChoiceOption | None, custom: Sequence[OfferedTool], hosted: Sequence[str]) -> None:
    if choice is None:
        return
    if choice.type == "tool" and choice.name in hosted:
        raise _refused(f"{choice.name!r} is a tool that only Anthropic's servers have; offer a custom tool.")
    if choice.type == "tool" and choice.name not in {tool.name for tool in custom}:
        raise _refused(f"{choice.name[:80]!r} is not among the tools.")
    if choice.type == "any" and not custom:
        problem = "all tools are ones that only Anthropic's servers have; offer a custom tool."
        raise _refused(problem if hosted else "there are no tools to choose from; send tools.")


def _refused(problem: str) -> ApiError:
    return ApiError(ErrorForm.INVALID_REQUEST, f"tool_choice: {problem}", param="tool_choice")


def _function(tool: CustomTool) -> dict[str, Any]:
    given = {"description": tool.description, "strict": tool.strict}
    optional = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema, **optional}}


def _choice(choice: ToolChoiceOption | None) -> dict[str, Any]:
    if choice is None:
        return {}
    single = choice.type != "none" and choice.disable_parallel_tool_use
    parallel = {"parallel_tool_calls": False} if single else {}
    match choice.type:
        case "tool":
            return {"tool_choice": {"type": "function", "function": {"name": choice.name}}, **parallel}
        case "any":
            return {"tool_choice": "required", **parallel}
    return {"tool_choice": choice.type, **parallel}
