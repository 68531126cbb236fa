"""Requests in the shapes of Codex, and a reader of its streams. Written by us from what its sources send and read."""

import json
from typing import Any

Said = dict[str, Any]

PATCH_GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""
EXEC: Said = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
PATCH: Said = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. This is a FREEFORM tool, so do not wrap the patch in JSON.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}
SERVER: Said = {
    "type": "namespace",
    "name": "mcp__docs__",
    "description": "Tools in the mcp__docs__ namespace.",
    "tools": [
        {
            "type": "function",
            "name": "find",
            "description": "Finds a page.",
            "strict": False,
            "defer_loading": True,
            "parameters": {"type": "object", "properties": {"words": {"type": "string"}}},
        }
    ],
}
SEARCH: Said = {"type": "web_search", "external_web_access": False, "search_content_types": ["text", "image"]}
TOOL_SEARCH: Said = {"type": "tool_search", "execution": "client", "description": "", "parameters": {"type": "object"}}


def message(role: str, *texts: str) -> Said:
    """Return a message item; of the assistant, as Codex sends one back."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def turn(*history: Said, prompt: str = "Fix the typo.") -> Said:
    """Return the body of a turn's request, with what the turn has brought so far."""
    context = "<environment_context>\n  <cwd>/work</cwd>\n  <shell>zsh</shell>\n</environment_context>"
    return {
        "model": "default",
        "instructions": "You are a coding agent.",
        "input": [
            message("developer", "<permissions>read-only</permissions>"),
            message("user", context),
            message("user", prompt),
            *history,
        ],
        "tools": [EXEC, PATCH, SEARCH, TOOL_SEARCH, SERVER],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a-thread",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }


class CodexStream:
    """Reads a stream as Codex does: items when they are done, text by its deltas, the end by `response.completed`."""

    def __init__(self, body: str) -> None:
        self.items = list[Said]()
        self.text = ""
        self.summary = ""
        self.usage: Said | None = None
        for line in body.splitlines():
            if line.startswith("data: "):
                self._read(json.loads(line.removeprefix("data: ")))

    def _read(self, event: Said) -> None:
        match event["type"]:
            case "response.output_item.done":
                self.items.append(event["item"])
            case "response.output_text.delta":
                self.text += event["delta"]
            case "response.reasoning_summary_text.delta":
                assert event["summary_index"] == 0
                self.summary += event["delta"]
            case "response.completed":
                assert event["response"]["id"]
                self.usage = event["response"]["usage"]
            case "response.failed" | "response.incomplete" | "error":
                raise AssertionError(event)


def sent_back(item: Said) -> Said:
    """Return an item as the next request has it: without its id and status, and without the text of its reasoning."""
    return {name: value for name, value in item.items() if name not in ("id", "status", "content")} | (
        {"content": item["content"]} if item["type"] == "message" else {}
    )
