"""Numbers with nouns, for messages."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 line`, `2,000 lines`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
