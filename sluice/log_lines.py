"""Writes the log of workers and gateways: a line for each record in files, as text or JSON, and lines that end at words
on a terminal."""

import logging
import os
import re
import sys
import textwrap
from typing import Literal

_LINE = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_SHORT_LINE, _SHORT_TIME = "%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"
_INDENT = " " * len("21:30:00 I ")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


LogFormat = Literal["text", "json"]


def set_up_logging(logger: str, level: str, log_format: LogFormat = "text", **fields: str) -> None:
    """Log to stderr: this logger from the level on, others from WARNING on at the earliest, as httpx logs every
    request of a download. `fields`: of every record that is written as JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(_json_formatter(fields) if log_format == "json" else _text_formatter())
    logging.basicConfig(level=max(logging.WARNING, logging.getLevelNamesMapping()[level]), handlers=[handler])
    logging.getLogger(logger).setLevel(level)


def _text_formatter() -> logging.Formatter:
    """Return a formatter of lines: with short times if stderr is a terminal."""
    return LineFormatter(_SHORT_LINE, _SHORT_TIME) if sys.stderr.isatty() else LineFormatter(_LINE)


def _json_formatter(fields: dict[str, str]) -> logging.Formatter:
    """Return a formatter of JSON objects, a line each, with what a call passes as `extra`, and UTC times."""
    from pythonjsonlogger.json import JsonFormatter  # with the worker and the gateway; the client has redis-py only

    class ShortJsonFormatter(JsonFormatter):
        def process_log_record(self, log_data: dict[str, object]) -> dict[str, object]:
            return {**log_data, "message": shortened(str(log_data["message"]))}

    return ShortJsonFormatter(
        "%(levelname)s %(name)s %(message)s",
        rename_fields={"levelname": "level", "name": "logger", "exc_info": "traceback"},
        static_fields=fields,
        timestamp="time",
    )


class LineFormatter(logging.Formatter):
    """Escapes control characters in messages and indents tracebacks, so that no text of a client can look like a
    record. Shortens long messages. On a terminal, lines break between words, and further ones are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record's lines, without its traceback."""
        record.message = escaped(shortened(record.message))
        return wrapped(super().formatMessage(record), _columns())

    def formatException(self, ei: object) -> str:
        """Return the traceback, its lines escaped and indented."""
        lines = super().formatException(ei).split("\n")  # type: ignore[arg-type]
        return "\n".join(f"  {escaped(line)}" for line in lines)


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
        max(columns, 40),
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def shortened(text: str, max_characters: int = 4_000) -> str:
    """Return the text, cut at `max_characters`."""
    return text if len(text) <= max_characters else f"{text[:max_characters]}... ({len(text):,} characters)"


def escaped(text: str) -> str:
    """Return the text with control characters, line separators and lone surrogates as Python escapes."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
