"""Prints what a table's run would ask, and how the answers to two prompts differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import JustifyMethod
from rich.text import Text

from sluice.batch.tables import Written, as_text
from sluice.cli.terminal.output import print_table
from sluice.cli.terminal.view import console, printable
from sluice.wording import counted


def print_prompt(number: int, body: Mapping[str, Any]) -> None:
    """Print the request of a row."""
    out = console()
    out.print(Text(f"── row {number:,}", "bold"))
    for message in body["messages"]:
        out.print(Text(f"{message['role']}:", "dim"))
        content = message["content"]
        for part in [content] if isinstance(content, str) else map(_part, content):
            out.print(Text(printable(_cut(part))), soft_wrap=True)


def _part(part: Mapping[str, Any]) -> str:
    if part["type"] == "text":
        return str(part["text"])
    url = part["image_url"]["url"]
    return f"[image: {len(url):,} characters of base64]" if url.startswith("data:") else f"[image: {url}]"


def _cut(text: str) -> str:
    most = 2_000  # characters of a prompt or an answer: about a screen
    more = len(text) - most
    return f"{text[:most]}… and {counted(more, 'more character')}" if more > 0 else text


@dataclass(slots=True)
class PromptScore:
    """Sums over the answers to one prompt."""

    name: str
    answered: int = 0
    errors: int = 0
    cut_off: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    characters: int = 0  # of the answers

    def add(self, cells: Mapping[str, Any], fields: Sequence[str]) -> None:
        """Add the new cells of a row."""
        self.answered += cells["error"] is None
        self.errors += cells["error"] is not None
        self.cut_off += cells.get("finish_reason") == "length"
        self.prompt_tokens += cells.get("prompt_tokens") or 0
        self.completion_tokens += cells.get("completion_tokens") or 0
        self.characters += sum(len(as_text(cells.get(name))) for name in fields)


@dataclass(slots=True)
class Comparison:
    """The answers to two prompts for the same rows. `fields`: the columns of an answer."""

    fields: Sequence[str]
    scores: tuple[PromptScore, PromptScore]
    same: dict[str, int] = field(default_factory=dict)  # rows with equal values, by field
    both: int = 0  # rows that both prompts have an answer for
    different: list[dict[str, Any]] = field(default_factory=list)

    def add(self, key: str, one: Written, other: Written) -> None:
        """Add a row with its new cells for each prompt. `key`: its name."""
        cells = one[1], other[1]
        for score, each in zip(self.scores, cells, strict=True):
            score.add(each, self.fields)
        has_both = all(each["error"] is None for each in cells)
        self.both += has_both
        values = {name: [_value(each, name) for each in cells] for name in self.fields}
        unlike = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
        for name in self.fields:
            self.same[name] = self.same.get(name, 0) + (has_both and name not in unlike)
        if not has_both:
            unlike["error"] = [each["error"] for each in cells]
        if unlike:
            self.different.append({"row": one[0].number, "key": key, "values": unlike})


def _value(cells: Mapping[str, Any], name: str) -> Any:
    value = cells.get(name)
    return value.strip() if isinstance(value, str) else value


def print_comparison(found: Comparison) -> None:
    """Print tables: the sums, the agreement of each field, and the first rows that differ."""
    rows = {
        "answered": [f"{score.answered:,}" for score in found.scores],
        "with an error": [f"{score.errors:,}" for score in found.scores],
        "cut off": [f"{score.cut_off:,}" for score in found.scores],
        "prompt tokens": [f"{score.prompt_tokens:,}" for score in found.scores],
        "answer tokens": [f"{score.completion_tokens:,}" for score in found.scores],
        "characters of an answer": [_mean(score.characters, score.answered) for score in found.scores],
    }
    names: dict[str, JustifyMethod] = {score.name: "right" for score in found.scores}
    print_table("Both prompts", {"": "left", **names}, [(name, *values) for name, values in rows.items()])
    agreement = [(name, f"{same:,} of {found.both:,}", _percent(same, found.both)) for name, same in found.same.items()]
    print_table("Equal values, where both answered", {"field": "left", "rows": "right", "": "right"}, agreement)
    if not found.different:
        return
    shown = found.different[:10]  # about a screen
    more = f", the first {len(shown)} of {len(found.different):,}" if len(found.different) > len(shown) else ""
    cells = [
        (row["key"] if place == 0 else "", name, *(_cut(as_text(value)) for value in pair))
        for row in shown
        for place, (name, pair) in enumerate(row["values"].items())
    ]
    columns: dict[str, JustifyMethod] = dict.fromkeys(["row", "field", *names], "left")
    print_table(f"Rows that differ{more}", columns, cells)


def _mean(total: int, count: int) -> str:
    return f"{total / count:,.0f}" if count else "–"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"
