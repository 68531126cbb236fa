"""Translates OpenAI's function calling of 2023 to tools, so that the rest of the worker handles one form."""

from collections import defaultdict, deque

from schemas import ChatRequest
from schemas.chat import NamedFunction, NamedTool, Tool
from schemas.messages import AssistantMessage, FunctionMessage, Message, ToolCall, ToolMessage


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
