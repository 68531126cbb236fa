"""Writes the log of a gateway: a line for each record in files, and lines that end at words on a terminal."""

import logging
import os
import sys
import textwrap

_LINE = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_SHORT_LINE, _SHORT_TIME = "%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"
_INDENT = " " * len("21:30:00 I ")
_MIN_COLUMNS = 40


def set_up_logging() -> None:
    """Log to stderr; libraries from WARNING on."""
    handler = logging.StreamHandler()
    is_terminal = sys.stderr.isatty()
    handler.setFormatter(TerminalFormatter(_SHORT_LINE, _SHORT_TIME) if is_terminal else logging.Formatter(_LINE))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("sluice.gateway").setLevel(logging.INFO)


class TerminalFormatter(logging.Formatter):
    """Breaks the line of a record between words; further lines are indented. Tracebacks stay as they are."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record's lines, without its traceback."""
        return wrapped(super().formatMessage(record), _columns())


def _columns() -> int:
    """Return the width of the terminal; 0 if it has none, or is gone."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0


def wrapped(line: str, columns: int) -> str:
    """Return the line in lines of at most `columns` characters, or 40, as far as its words allow that; in one line if
    `columns` is 0."""
    if columns == 0:
        return line
    lines = textwrap.wrap(
        line,
        max(columns, _MIN_COLUMNS),
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)
