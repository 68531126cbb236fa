"""The body of a request for a response, as a chat completion of the contract."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice.http_errors import ErrorForm
from sluice.interfaces import fields
from sluice.interfaces.fields import refusal
from sluice.interfaces.tools import RequestTools, read_tool_choice, read_tools

# Fields that a chat completion has under the same name: OpenAI's, and then the contract's own. A worker checks them.
_SAME = (
    "model", "temperature", "top_p", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user",
    "service_tier", "store",
    "chat_template_kwargs", "deadline_s", "frequency_penalty", "ignore_eos", "logit_bias", "loop_guard", "min_p",
    "prediction",
    "presence_penalty", "repetition_penalty", "seed", "specprefill", "specprefill_keep_pct", "speculation", "stop",
    "top_k",
)  # fmt: skip
_READ = (
    "input", "instructions", "tools", "tool_choice", "text", "reasoning", "max_output_tokens", "metadata", "include",
    "stream", "background", "previous_response_id", "truncation", "top_logprobs",
)  # fmt: skip
# Without effect here: hints about OpenAI's cache and streams, a limit of hosted calls, and Codex's own notes.
WITHOUT_EFFECT = (
    "client_metadata", "max_tool_calls", "prompt_cache_options", "prompt_cache_retention", "stream_options",
)  # fmt: skip
KNOWN = frozenset((*_SAME, *_READ, *WITHOUT_EFFECT))
_INCLUDABLE = frozenset(
    {
        "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
        "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
        "web_search_call.action.sources", "web_search_call.results",
    }
)  # fmt: skip
_SUMMARIES = ("auto", "concise", "detailed")
_REASONING_FIELDS = ("effort", "max_tokens", "summary", "generate_summary", "context")
_METADATA_CHARACTERS = (64, 512)  # of a name, and of a value


@dataclass(frozen=True)
class ResponseRequest:
    """A request for a response."""

    body: Mapping[str, Any]
    items: tuple[Any, ...]  # the input's, not yet read
    tools: RequestTools
    chat: Mapping[str, Any]  # the chat completion, without its messages
    includes: frozenset[str]
    stream: bool
    background: bool
    store: bool
    ignored: tuple[str, ...] = ()  # what was left out of the body

    @property
    def instructions(self) -> str | None:
        """The system message of this request alone."""
        return self.body.get("instructions")

    @property
    def previous(self) -> str | None:
        """Id of the response that this one continues."""
        return self.body.get("previous_response_id")

    @property
    def summary(self) -> str | None:
        """The kind of summary that was requested of the reasoning."""
        reasoning = self.body.get("reasoning") or {}
        return reasoning.get("summary") or reasoning.get("generate_summary")


def read_response_request(body: Mapping[str, Any]) -> ResponseRequest:
    """Read the body, except for the items of its input. Raises `ApiError`, which names the field."""
    fields.check_known(body, KNOWN)
    tools = read_tools(body.get("tools"))
    store = fields.flag(body.get("store"), "store", True)
    background = fields.flag(body.get("background"), "background", False)
    if background and not store:
        raise refusal("background", "a response in the background is stored; leave out store: false.")
    _check_plain_fields(body)
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat |= read_tool_choice(body.get("tool_choice"), tools) | _output(body) | _metadata(body)
    includes = _includes(body)
    return ResponseRequest(
        body,
        _items(body),
        tools,
        chat | _logprobs(body, includes),
        includes,
        fields.flag(body.get("stream"), "stream", False),
        background,
        store,
    )


def _check_plain_fields(body: Mapping[str, Any]) -> None:
    """Check the fields that need no translation. Raises `ApiError`."""
    fields.optional_string(body.get("instructions"), "instructions")
    fields.optional_string(body.get("previous_response_id"), "previous_response_id")
    fields.flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True)
    fields.whole_number(body.get("max_tool_calls"), "max_tool_calls", 0)
    if body.get("truncation") not in (None, "disabled"):
        problem = "only 'disabled' is supported, since nothing is dropped from a conversation; shorten it yourself."
        raise refusal("truncation", problem, ErrorForm.UNSUPPORTED_VALUE)


def _items(body: Mapping[str, Any]) -> tuple[Any, ...]:
    given = body.get("input")
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    if isinstance(given, list):
        return tuple(given)
    if given is None and (body.get("previous_response_id") or body.get("instructions")):
        return ()
    raise refusal("input", "it must be a string or a list of items.", ErrorForm.INVALID_TYPE)


def _output(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for the answer's form, length and reasoning. Raises `ApiError`."""
    text = fields.optional_mapping(body.get("text"), "text")
    fields.check_known(text, ("format", "verbosity"), "text")
    reasoning = fields.optional_mapping(body.get("reasoning"), "reasoning")
    fields.check_known(reasoning, _REASONING_FIELDS, "reasoning")
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) is not None:
            fields.option(reasoning[name], _SUMMARIES, f"reasoning.{name}")
    given = {
        "response_format": _response_format(fields.optional_mapping(text.get("format"), "text.format")),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
        "max_reasoning_tokens": fields.whole_number(reasoning.get("max_tokens"), "reasoning.max_tokens", 0),
        "max_completion_tokens": fields.whole_number(body.get("max_output_tokens"), "max_output_tokens"),
    }
    return {name: value for name, value in given.items() if value is not None}


def _response_format(format: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    if kind != "json_schema":
        raise refusal("text.format.type", "it must be 'text', 'json_object' or 'json_schema'.")
    fields.check_known(format, ("type", "name", "schema", "strict", "description"), "text.format")
    fields.string(format.get("name"), "text.format.name")
    fields.mapping(format.get("schema"), "text.format.schema")
    schema = {name: value for name, value in format.items() if name != "type" and value is not None}
    return {"type": kind, "json_schema": schema}


def _metadata(body: Mapping[str, Any]) -> dict[str, Any]:
    metadata = fields.optional_mapping(body.get("metadata"), "metadata")
    if len(metadata) > 16:
        raise refusal("metadata", f"it has {len(metadata):,} entries; at most 16 are kept.")
    for name, value in metadata.items():
        longest_name, longest = _METADATA_CHARACTERS
        if len(name) > longest_name:
            raise refusal("metadata", f"a name has {len(name):,} characters; at most {longest_name} are kept.")
        if len(fields.string(value, f"metadata.{name}")) > longest:
            raise refusal(f"metadata.{name}", f"it has {len(value):,} characters; at most {longest} are kept.")
    return {"metadata": metadata} if metadata else {}


def _includes(body: Mapping[str, Any]) -> frozenset[str]:
    if body.get("include") is None:
        return frozenset()
    return frozenset(
        fields.option(each, _INCLUDABLE, place) for place, each in fields.entries(body["include"], "include")
    )


def _logprobs(body: Mapping[str, Any], includes: frozenset[str]) -> dict[str, Any]:
    wanted = fields.whole_number(body.get("top_logprobs"), "top_logprobs", 0)
    if not wanted and "message.output_text.logprobs" not in includes:
        return {}
    return {"logprobs": True, "top_logprobs": wanted or 0}


_OWN_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}


def own_name(param: str | None) -> str | None:
    """Return the field of a response's request for one of the contract's."""
    name = re.match(r"\w+", param or "")
    return _OWN_NAMES.get(name[0], param) if name else param
