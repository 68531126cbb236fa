"""The form of the log: one line for each record, whatever a client has called its job."""

import logging
import re

_LONGEST = 4_000  # characters of a message
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class LineFormatter(logging.Formatter):
    """Escapes control characters in messages and indents tracebacks, so that no text from outside can look like a
    record of ours. Shortens messages."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(shortened(record.message))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        lines = super().formatException(ei).split("\n")  # type: ignore[arg-type]
        return "\n".join(f"  {escaped(line)}" for line in lines)


def shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


def escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
