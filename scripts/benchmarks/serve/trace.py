"""Recorded arrivals: a file of JSON lines."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from scripts.benchmarks.serve.workload import Chat, Texts, Turn
from sluice.contract.keys import LANES, Lane

FIELDS = {"at", "prompt", "prompt_tokens", "max_tokens", "tenant", "chat", "turn", "lane"}
HELP = (
    'JSON lines: {"at": seconds, "prompt": text or "prompt_tokens": number, "max_tokens": number}, and if wanted '
    '"tenant", "lane" (interactive or batch), "chat" (an id) with "turn" (1, 2, ...): a later turn is sent with the '
    "messages and answers before it, at its own time or when the answer before it has ended"
)


class BadTrace(ValueError):
    """A trace that cannot be replayed; the message names the line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a trace: a turn of a chat, or a chat of its own."""

    at_s: float
    prompt: str | int  # the text, or its number of tokens
    max_tokens: int
    tenant: str | None
    lane: Lane
    chat: str
    turn: int


def read(path: Path) -> list[Entry]:
    """Return the lines of a file in order of their time. Raises BadTrace, also for a file that cannot be read."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"{path}: cannot be read ({error}); give a file of JSON lines") from None
    return parse(text.splitlines())


def parse(lines: Iterable[str]) -> list[Entry]:
    """Return the entries in order of their time; empty lines are skipped. Raises BadTrace."""
    entries = [_entry(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise BadTrace("the trace is empty; give at least one line")
    _check_turns(entries)
    return sorted(entries, key=lambda entry: (entry.at_s, entry.turn))


def chats(entries: Iterable[Entry], words_of: Callable[[int], int], dice: Random) -> list[Chat]:
    """Return the chats of a trace. `words_of` turns a number of prompt tokens into a number of words."""
    texts = Texts(dice)
    by_chat = dict[str, list[Entry]]()
    for entry in entries:
        by_chat.setdefault(entry.chat, []).append(entry)
    return [_chat(each, words_of, texts) for each in by_chat.values()]


def _chat(entries: list[Entry], words_of: Callable[[int], int], texts: Texts) -> Chat:
    entries = sorted(entries, key=lambda entry: entry.turn)
    prompts = (
        entry.prompt if isinstance(entry.prompt, str) else texts.draw(max(1, words_of(entry.prompt)))
        for entry in entries
    )
    turns = tuple(
        Turn(prompt, entry.max_tokens, at_s=entry.at_s) for entry, prompt in zip(entries, prompts, strict=True)
    )
    return Chat(turns, entries[0].tenant, entries[0].lane)


def _check_turns(entries: Iterable[Entry]) -> None:
    turns = dict[str, list[int]]()
    for entry in entries:
        turns.setdefault(entry.chat, []).append(entry.turn)
    for chat, numbers in turns.items():
        if sorted(numbers) != [*range(1, len(numbers) + 1)]:
            raise BadTrace(f"chat {chat!r}: its turns are {sorted(numbers)}; number them 1, 2, ... without gaps")


def _entry(number: int, line: str) -> Entry:
    where = f"line {number}"
    try:
        value = json.loads(line)
    except ValueError:
        raise BadTrace(f"{where}: not JSON; give one object a line") from None
    if not isinstance(value, dict):
        raise BadTrace(f"{where}: not an object; give one object a line")
    if unknown := sorted(value.keys() - FIELDS):
        raise BadTrace(f"{where}: unknown field {unknown[0]!r}; the fields are {', '.join(sorted(FIELDS))}")
    return Entry(
        _number(where, value, "at", 0.0),
        _prompt(where, value),
        int(_number(where, value, "max_tokens", 1)),
        _text(where, value, "tenant"),
        _lane(where, value),
        _text(where, value, "chat") or f"#{number}",
        int(_number(where, {"turn": 1, **value}, "turn", 1)),
    )


def _prompt(where: str, value: dict[str, Any]) -> str | int:
    if ("prompt" in value) == ("prompt_tokens" in value):
        raise BadTrace(f"{where}: give either prompt or prompt_tokens")
    if "prompt" in value:
        return _text(where, value, "prompt") or ""
    return int(_number(where, value, "prompt_tokens", 1))


def _number(where: str, value: dict[str, Any], name: str, least: float) -> float:
    found: Any = value.get(name)
    kind = "number" if isinstance(least, float) else "whole number"
    fits = isinstance(found, int | float if isinstance(least, float) else int) and not isinstance(found, bool)
    if not fits or not least <= found < float("inf"):
        raise BadTrace(f"{where}: {name} must be a {kind} of at least {least:g}, and is {json.dumps(found)}")
    return float(found)


def _text(where: str, value: dict[str, Any], name: str) -> str | None:
    found = value.get(name)
    if found is not None and not (isinstance(found, str) and found):
        raise BadTrace(f"{where}: {name} must be a string that is not empty, and is {json.dumps(found)}")
    return found


def _lane(where: str, value: dict[str, Any]) -> Lane:
    found = value.get("lane", "interactive")
    for lane in LANES:
        if found == lane:
            return lane
    raise BadTrace(f"{where}: lane must be interactive or batch, and is {json.dumps(found)}")
