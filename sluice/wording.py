"""Parts of messages: numbers with nouns, and sentences."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 line`, `2,000 lines`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def full_sentence(text: str) -> str:
    """Return the text with a capital first letter and an end mark."""
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "?", "!")) else ".")


_CANCELLED = {
    "requested": "The job was cancelled, as requested.",
    "disconnected": "The job was cancelled, since its client has left.",
}


def cancelled_sentence(reason: str) -> str:
    """Return the message for a job that ended as `cancelled`, by the reason in its event."""
    return _CANCELLED.get(reason) or f"The job was cancelled, for this reason: {reason}."
