"""Bodies of Anthropic's Messages. Those of Claude Code are written by us after its documentation of gateways: the
fields that it sends, with other texts."""

from typing import Any

EPHEMERAL = {"type": "ephemeral"}

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HOSTED = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}

READ: dict[str, Any] = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"file_path": {"type": "string"}, "limit": {"type": "number"}},
        "required": ["file_path"],
        "additionalProperties": False,
    },
}
BASH: dict[str, Any] = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
SYSTEM = [
    {"type": "text", "text": "You are a coding assistant."},
    {"type": "text", "text": "Answer briefly.", "cache_control": EPHEMERAL},
]
USER_ID = f"user_{'0' * 64}_account_{'1' * 36}_session_{'2' * 36}"
COMMON: dict[str, Any] = {
    "model": "claude-sonnet-4-5-20250929",
    "system": SYSTEM,
    "max_tokens": 32_000,
    "metadata": {"user_id": USER_ID},
    "stream": True,
}
REMINDER = {"type": "text", "text": "<system-reminder>\nThe list of tasks is empty.\n</system-reminder>"}
QUESTION = {"type": "text", "text": "What does main.py do?", "cache_control": EPHEMERAL}

CLAUDE_CODE: dict[str, dict[str, Any]] = {
    "the title of a conversation": {
        **COMMON,
        "model": "claude-haiku-4-5-20251001",
        "max_tokens": 512,
        "temperature": 1,
        "messages": [{"role": "user", "content": "What does main.py do?"}],
        "tools": [],
    },
    "the first turn": {
        **COMMON,
        "messages": [{"role": "user", "content": [REMINDER, QUESTION]}],
        "tools": [READ, {**BASH, "cache_control": EPHEMERAL}, HOSTED],
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
    },
    "a turn after two calls": {
        **COMMON,
        "messages": [
            {"role": "user", "content": [REMINDER, QUESTION]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I need the file.", "signature": "c2ln"},
                    {"type": "text", "text": "I read it."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/main.py"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"tool_use_id": "toolu_1", "type": "tool_result", "content": [{"type": "text", "text": "print()"}]},
                    {
                        "tool_use_id": "toolu_2",
                        "type": "tool_result",
                        "content": "<tool_use_error>denied</tool_use_error>",
                        "is_error": True,
                        "cache_control": EPHEMERAL,
                    },
                ],
            },
        ],
        "tools": [READ, BASH],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    },
}
