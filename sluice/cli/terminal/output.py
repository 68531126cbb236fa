"""Prints JSON and tables on stdout."""

import io
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from sluice.cli.terminal.view import console, printable

# In JSON these occur in strings only, where an escape is equivalent: see `printable`.
_TO_ESCAPE = re.compile(r"[\x7f-\x9f\ud800-\udfff]")


def replace_unencodable() -> None:
    """Print "?" for characters that the encoding of stdout lacks, such as an emoji in a locale of Latin-1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def print_json(value: dict[str, Any], indent: int | None = None) -> None:
    """Print a JSON object, on one line unless `indent` is given, with control characters escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    escaped = _TO_ESCAPE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    sys.stdout.buffer.write(escaped.encode() + b"\n")
    sys.stdout.buffer.flush()


def print_table(
    title: str, columns: Mapping[str, JustifyMethod], rows: Iterable[Sequence[str]], *, whole: Collection[str] = ()
) -> None:
    """Print a table. Control characters in cells are replaced, and long cells are folded, except in the columns
    `whole`."""
    table = Table()
    for name, justify in columns.items():
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in whole)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    # In a pipe no id is folded. A title of the table would be folded to the width of the columns.
    console(width=None if sys.stdout.isatty() else 1000).print(Text(printable(title), "table.title"), table)


def format_duration(seconds: float) -> str:
    """Return the largest two units of a duration: `3 d 4 h`, `5 min 7 s`; `0 s` below a second or if negative."""
    left, parts = int(min(max(0.0, seconds), 1e12)), []  # a foreign score in a queue may be infinite
    for unit, size_s in {"d": 86_400, "h": 3_600, "min": 60, "s": 1}.items():
        count, left = divmod(left, size_s)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"
