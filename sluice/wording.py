"""Parts of messages: numbers with nouns, sentences, and what is wrong with a text that should be JSON."""

from json import JSONDecodeError


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 line`, `2,000 lines`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def full_sentence(text: str) -> str:
    """Return the text with a capital first letter and an end mark."""
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "?", "!")) else ".")


def json_problem(error: ValueError | RecursionError) -> str:
    """Return the clause that says why a text is not JSON: for a mistake of syntax the place, and what stands there."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, JSONDecodeError):
        return str(error)
    around = 20  # characters on each side of the mistake: enough to find it, and too few to fill a message
    before = error.doc[max(error.pos - around, 0) : error.pos]
    there = error.doc[error.pos : error.pos + around]
    place = f"line {error.lineno:,} column {error.colno:,}"
    after = f", after {before!a}" if before else ""
    return f"{error.msg.removesuffix(' at')} at {place}: {ascii(there) if there else 'the text ends'}{after}"


_CANCELLED = {
    "requested": "The job was cancelled, as requested.",
    "disconnected": "The job was cancelled, since its client has left.",
}


def cancelled_sentence(reason: str) -> str:
    """Return the message for a job that ended as `cancelled`, by the reason in its event."""
    return _CANCELLED.get(reason) or f"The job was cancelled, for this reason: {reason}."
