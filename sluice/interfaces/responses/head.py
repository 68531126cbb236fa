"""The head of a response: the fields that are fixed before its first token. All gateways build the same events from it
and the job's log."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice.interfaces.responses.request import ResponseRequest
from sluice.interfaces.tools import RequestTools, read_tools

PREFIX = "resp_"

Response = dict[str, Any]


@dataclass(frozen=True)
class ResponseHead:
    """The fields that a response repeats from its request, and how its output is to be written."""

    id: str
    created_at: int  # Unix seconds
    echo: Mapping[str, Any]
    summary: bool  # reasoning goes into `summary`, and into `content` otherwise
    enclosed: bool  # reasoning items carry `encrypted_content`
    logprobs: bool

    @property
    def suffix(self) -> str:
        """The part of the id that the ids of its items repeat."""
        return self.id.removeprefix(PREFIX)

    @property
    def background(self) -> bool:
        """True if the response goes on without a reader."""
        return bool(self.echo["background"])

    def tools(self) -> RequestTools:
        """Return the tools of the request."""
        return read_tools(self.echo["tools"])


def new_head(request: ResponseRequest, id: str, created_at: int, model: str) -> ResponseHead:
    """Return the head of a new response."""
    return ResponseHead(
        id,
        created_at,
        _echo(request, model),
        summary=request.summary is not None,
        enclosed="reasoning.encrypted_content" in request.includes,
        logprobs=bool(request.chat.get("logprobs")),
    )


def skeleton(head: ResponseHead) -> Response:
    """Return the response without output, status and usage."""
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created_at,
        "completed_at": None,
        "status": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **head.echo,
    }


def _echo(request: ResponseRequest, model: str) -> dict[str, Any]:
    body = request.body
    text = body.get("text") or {}
    reasoning = body.get("reasoning") or {}
    verbosity = text.get("verbosity")
    # Open Responses requires numbers. 1 stands for the model's own default, which no gateway knows.
    sampling = {name: 1 if (given := body.get(name)) is None else given for name in ("temperature", "top_p")}
    return {
        "background": request.background,
        "instructions": request.instructions,
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": request.previous,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": request.summary},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "flex" if body.get("service_tier") == "flex" else "default",
        "store": request.store,
        **sampling,
        **{name: body.get(name) or 0 for name in ("presence_penalty", "frequency_penalty")},
        "text": {"format": text.get("format") or {"type": "text"}, **({"verbosity": verbosity} if verbosity else {})},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_filled(tool) for tool in request.tools.offered],
        "top_logprobs": body.get("top_logprobs") or 0,
        "truncation": "disabled",
        "user": body.get("user"),
        **({"sluice": {"ignored": list(request.ignored)}} if request.ignored else {}),
    }


def _filled(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool with the fields that OpenAI's answers always have."""
    required = {"parameters": None, "strict": None} if tool.get("type") == "function" else {}
    return {**required, **tool}
