"""Writes the log: one line for each record, for any job id of a client."""

import logging
import re

_LONGEST = 4_000  # characters of a message
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def set_up_logging(level: str) -> None:
    """Log to stderr from this level on; libraries from WARNING on, as httpx logs every request of a download."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(level=max(logging.WARNING, logging.getLevelNamesMapping()[level]), handlers=[handler])
    logging.getLogger("sluice").setLevel(level)


class LineFormatter(logging.Formatter):
    """Escapes control characters in messages and indents tracebacks, so that no text of a client can look like a
    record. Shortens long messages."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record's line without its traceback."""
        record.message = escaped(shortened(record.message))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        """Return the traceback, its lines escaped and indented."""
        lines = super().formatException(ei).split("\n")  # type: ignore[arg-type]
        return "\n".join(f"  {escaped(line)}" for line in lines)


def shortened(text: str) -> str:
    """Return the text, cut at `_LONGEST` characters."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


def escaped(text: str) -> str:
    """Return the text with control characters, line separators and lone surrogates as Python escapes."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
