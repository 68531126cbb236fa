"""Finds where a longer conversation's prompt parts from the shorter one's, and why."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from schemas import ChatRequest
from schemas.messages import AssistantMessage, UserMessage
from worker.text.prompt.boundaries import common_prefix
from worker.text.prompt.prompt import Prompt
from worker.text.prompt.template_compat import Think

Change = Callable[[ChatRequest], ChatRequest]
Begins = Callable[[ChatRequest, ChatRequest], Awaitable[bool]]  # True if the second's prompt begins with the first's

_COMMON_THINK = "<think>"  # of models whose own marker is not known
_OTHERWISE = "writes earlier messages in another way when others follow"


@dataclass(frozen=True, slots=True)
class Parting:
    """Where the next turn's prompt parts from a prompt before the end of its messages."""

    token: int  # the first that differs
    why: str  # what the template does


def _without_thoughts(request: ChatRequest) -> ChatRequest:
    return _with_answers(request, lambda answer: {"reasoning": None, "reasoning_content": None})


def _without_text_beside_calls(request: ChatRequest) -> ChatRequest:
    return _with_answers(request, lambda answer: {"content": None, "refusal": None} if answer.tool_calls else {})


def _with_answers(request: ChatRequest, changes: Callable[[AssistantMessage], dict[str, None]]) -> ChatRequest:
    messages = [
        each.model_copy(update=changes(each)) if isinstance(each, AssistantMessage) else each
        for each in request.messages
    ]
    return request.model_copy(update={"messages": messages})


def _without_tools(request: ChatRequest) -> ChatRequest:
    return request.model_copy(update={"tools": None, "tool_choice": None})


def _without_system(request: ChatRequest) -> ChatRequest:
    messages = [each for each in request.messages if each.role not in ("system", "developer")]
    return request.model_copy(update={"messages": messages})


def _without_prefix(request: ChatRequest) -> ChatRequest:
    return _without_tools(_without_system(request))


def _without_any(request: ChatRequest) -> ChatRequest:
    return _without_prefix(_without_text_beside_calls(_without_thoughts(request)))


# The first without which the prompts do not part is the reason.
_REASONS: tuple[tuple[str, Change], ...] = (
    ("drops the thoughts of earlier turns", _without_thoughts),
    ("drops the text beside the calls of earlier turns, so it is put apart", _without_text_beside_calls),
    ("writes the tools in front of the last user message", _without_tools),
    ("writes the system message in front of the last user message", _without_system),
    ("writes system message and tools in front of the last user message", _without_prefix),
    ("writes several of them elsewhere: system message, tools, thoughts and text beside earlier calls", _without_any),
)


async def reason(
    begins: Begins, shorter: ChatRequest, longer: ChatRequest, texts: tuple[str, str], think: Think
) -> str:
    """Return why the prompts of two requests part, of which `texts` are the texts."""
    at, marker = common_prefix(*texts), think[0] if think else _COMMON_THINK
    if any(marker in text[max(0, at - len(marker)) : at + 2 * len(marker)] for text in texts):
        return _REASONS[0][0]
    for why, change in _REASONS:
        if await begins(change(shorter), change(longer)):
            return why
    return _OTHERWISE


async def next_parting(
    render: Callable[[ChatRequest], Awaitable[Prompt]],
    text_of: Callable[[Sequence[int]], str],
    request: ChatRequest,
    think: Think,
) -> Parting | None:
    """Return where the prompt of the next turn, after an answer and another question, parts from the request's own;
    None if it has all of its messages. Raises `JobFailure`."""

    async def begins(shorter: ChatRequest, longer: ChatRequest) -> bool:
        before, after = (await render(shorter)).tokens, (await render(longer)).tokens
        shared = text_of(before[: common_prefix(before, after)])
        return len(shared) >= _end_of_messages(text_of(before), shorter)

    answer = AssistantMessage.model_validate({"role": "assistant", "content": "…"})
    question = UserMessage.model_validate({"role": "user", "content": "…"})
    longer = request.model_copy(update={"messages": [*request.messages, answer, question]})
    if await begins(request, longer):
        return None
    tokens, others = (await render(request)).tokens, (await render(longer)).tokens
    why = await reason(begins, request, longer, (text_of(tokens), text_of(others)), think)
    return Parting(common_prefix(tokens, others), why)


def _end_of_messages(text: str, request: ChatRequest) -> int:
    """Return the end of the last content in a prompt's text, in characters."""
    for message in reversed(request.messages):
        content = message.content
        texts = [content] if isinstance(content, str) else [part.text for part in content or () if part.type == "text"]
        if words := "".join(texts[-1:]).strip():
            last = words.splitlines()[-1].strip()  # templates may indent lines, or escape their breaks
            return max(0, text.rfind(last)) + len(last)
    return 0
