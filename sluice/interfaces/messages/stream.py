"""Translates a job's events to the events of Anthropic's stream, and folds those into a whole message.

Thinking and text are emitted as they arrive. A tool call is emitted when it is complete; arguments that are no JSON
object are emitted in one.
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic_core import from_json

from sluice.contract.events import Cancelled, Delta, Event, Failed, Finished, Restarted, Started, Usage
from sluice.errors import JobCancelled, JobFailed
from sluice.interfaces.committed import told
from sluice.openai import JobRestarted

MessageEvent = dict[str, Any]

PING: MessageEvent = {"type": "ping"}
# Changes nothing, and Anthropic allows several. LiteLLM takes it for the end of the answer.
UNCHANGED: MessageEvent = {
    "type": "message_delta",
    "delta": {"stop_reason": None, "stop_sequence": None},
    "usage": {"output_tokens": 0},
}
# With the fields that Anthropic's description requires, like all objects here.
_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "", "citations": None},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageStream:
    """State of one streamed message."""

    def __init__(self, *, omit_thinking: bool = False, ignored: Sequence[str] = ()) -> None:
        """With `omit_thinking` thinking blocks have no text. `ignored`: what was left out of the request."""
        self._omit_thinking = omit_thinking
        self._ignored = ignored
        self._begun = False
        self._open: Literal["text", "thinking"] | None = None  # the kind of the open block
        self._thinking = hashlib.sha256()  # of the open block
        self._blocks = 0  # number of blocks begun
        self._calls: dict[int, _Call] = {}  # not emitted yet, by index

    def events(self, event: Event) -> list[MessageEvent]:
        """Return the stream's events for one event of the job. Raises `JobFailed` and `JobCancelled`, and
        `JobRestarted` if blocks were emitted that are now invalid."""
        match event:
            case Restarted() if self._begun:
                return self._restart()
            case Started() if not self._begun:
                self._begun = True
                return [_start(event.id, event.model, self._ignored)]
            case Delta():
                return self._delta(event)
            case Finished():
                return self._finish(event)
            case Failed():
                raise JobFailed(event.error)
            case Cancelled():
                raise JobCancelled(event.reason)
        return []

    def keep_alive(self, id: str, model: str, *, between_blocks: MessageEvent) -> MessageEvent:
        """Return an event that adds nothing to the message, for a silence after the events so far: one that Claude Code
        counts as a sign of life, which a `ping` is not. `id`, `model`: of the message, if it has not begun.
        `between_blocks`: the event while no block is open."""
        match self._open:
            case "text":
                return self._block_delta({"type": "text_delta", "text": ""})
            case "thinking":
                return self._block_delta({"type": "thinking_delta", "thinking": ""})
        if self._begun:
            return between_blocks
        self._begun = True
        return _start(id, model, self._ignored)

    def _restart(self) -> list[MessageEvent]:
        if self._blocks:
            raise JobRestarted("The answer starts over on another worker; the blocks so far are invalid.")
        self._calls.clear()
        return []

    def _delta(self, event: Delta) -> list[MessageEvent]:
        events = list[MessageEvent]()
        if event.reasoning:
            events += self._switch("thinking")
            self._thinking.update(event.reasoning.encode())
            if not self._omit_thinking:
                events.append(self._block_delta({"type": "thinking_delta", "thinking": event.reasoning}))
        if event.content:
            events += self._switch("text")
            events.append(self._block_delta({"type": "text_delta", "text": event.content}))
        for fragment in event.tool_calls or ():
            events += self._call(fragment)
        return events

    def _switch(self, kind: Literal["text", "thinking"]) -> list[MessageEvent]:
        """Close the open block if it is of the other kind, and open one of this kind."""
        if self._open == kind:
            return []
        events = self._close()
        self._open = kind
        self._thinking = hashlib.sha256()
        return [*events, self._begin_block(_EMPTY[kind])]

    def _close(self) -> list[MessageEvent]:
        """Close the open block. A signature is a digest of the thinking; it is not checked when it comes back."""
        if self._open is None:
            return []
        is_thinking, self._open = self._open == "thinking", None
        digest = b64encode(self._thinking.digest()).decode()
        signature = self._block_delta({"type": "signature_delta", "signature": digest})
        return [*([signature] if is_thinking else []), self._end_block()]

    def _call(self, fragment: dict[str, Any]) -> list[MessageEvent]:
        index, function = fragment["index"], fragment.get("function", {})
        events = list[MessageEvent]()
        if index not in self._calls:
            events = self._emit_calls(cut_off=False)
            self._calls[index] = _Call(fragment.get("id", ""), function.get("name", ""))
        self._calls[index].pieces.append(function.get("arguments") or "")
        return events

    def _emit_calls(self, *, cut_off: bool) -> list[MessageEvent]:
        """Emit the calls so far. With `cut_off` the last one may be incomplete."""
        calls, self._calls = list(self._calls.values()), {}
        events = list[MessageEvent]()
        for call in calls:
            events += self._close()
            events += self._call_block(call, partial=cut_off and call is calls[-1])
        return events

    def _call_block(self, call: "_Call", *, partial: bool) -> list[MessageEvent]:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}, "caller": {"type": "direct"}}
        begin = self._begin_block(block)
        written = "".join(call.pieces)
        if _input(written, partial=partial) is None:
            # An input is an object here, and clients parse it: they then tell the model what is wrong with it.
            written = json.dumps({"arguments": written}, ensure_ascii=False)
        delta = [self._block_delta({"type": "input_json_delta", "partial_json": written})] if written else []
        return [begin, *delta, self._end_block()]

    def _finish(self, event: Finished) -> list[MessageEvent]:
        events = self._emit_calls(cut_off=event.finish_reason == "length")
        stopped = event.finish_reason == "stop" and event.stop_sequence is not None
        delta = {
            "stop_reason": "stop_sequence" if stopped else _STOP_REASONS[event.finish_reason],
            "stop_sequence": event.stop_sequence if stopped else None,
            "stop_details": None,
            "container": None,
        }
        last = {"type": "message_delta", "delta": delta, "usage": _usage(event.usage)}
        return [*events, *self._close(), last, {"type": "message_stop"}]

    def _begin_block(self, block: dict[str, Any]) -> MessageEvent:
        self._blocks += 1
        return {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}

    def _block_delta(self, delta: dict[str, Any]) -> MessageEvent:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _end_block(self) -> MessageEvent:
        return {"type": "content_block_stop", "index": self._blocks - 1}


class _Call:
    """A tool call whose arguments arrive in pieces."""

    def __init__(self, id: str, name: str) -> None:
        self.id, self.name = id, name
        self.pieces = list[str]()  # of the arguments


def _input(arguments: str, *, partial: bool = True) -> dict[str, Any] | None:
    """Return the input of a call, as far as it is written; None if it is not a JSON object."""
    if not arguments.strip():
        return {}
    try:
        read = from_json(arguments, allow_partial=partial)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def whole_message(events: Iterable[MessageEvent]) -> dict[str, Any]:
    """Return the message that a complete stream describes."""
    message: dict[str, Any] = {}
    pieces: list[str] = []  # of the block that is being read
    for event in events:
        match event:
            case {"type": "message_start", "message": start}:
                message = {**start, "content": []}
            case {"type": "content_block_start", "content_block": block}:
                message["content"].append(dict(block))
                pieces.clear()
            case {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": signature}}:
                message["content"][-1]["signature"] = signature
            case {"type": "content_block_delta", "delta": delta}:
                pieces.append(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")
            case {"type": "content_block_stop"}:
                _complete(message["content"][-1], "".join(pieces))
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message = {**message, **delta, "usage": {**message["usage"], **usage}}
    return message


def _complete(block: dict[str, Any], written: str) -> None:
    """Set what the deltas of a block have written."""
    if block["type"] == "tool_use":
        block["input"] = _input(written) or {}
    else:
        block[block["type"]] = written


def _start(id: str, model: str, ignored: Sequence[str]) -> MessageEvent:
    message: dict[str, Any] = {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            **_usage(Usage(0, 0, 0)),
            "cache_creation": None,
            "inference_geo": None,
            "service_tier": "standard",
        },
    }
    return {"type": "message_start", "message": told(message, ignored)}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the usage in Anthropic's form: the tokens of the prompt are those from the cache and all others."""
    thinking = usage.reasoning_tokens
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": None if thinking is None else {"thinking_tokens": thinking},
        "server_tool_use": None,
    }
