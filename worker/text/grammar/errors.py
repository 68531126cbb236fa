"""Translates errors of llguidance (1.9) about a grammar to sentences for clients.

Its own messages name its options and types, and quote expressions that it generated; they go to the log. If a new
release changes a message, the client gets a general sentence.
"""

import logging

logger = logging.getLogger("sluice.text")

TOO_EXPENSIVE = "it is too large, too deep or too slow to compile."
TOO_MANY_STATES = "its patterns and lengths have too many states; anchor patterns with ^ and $, or count less."
_NOTHING_LEFT = "its keywords contradict each other, so nothing satisfies it; correct them."
_UNKNOWN = "it could not be turned into a grammar; make it simpler."
_LOGGED_CHARACTERS = 500

_CROWDED = "minProperties and maxProperties are not supported with optional properties; make these required."
_OVERLAP = "two of its patternProperties may match one name; write them so that they exclude each other."
_UNDECIDED = "its patterns and lengths take too long to compare; make them simpler."
_CIRCLE = "a reference with further keywords refers back to itself; move these keywords into the definition."
_PROPERTY = "a pattern names a Unicode property that does not exist; correct it."

_SENTENCES = {
    "nsatisfiable": _NOTHING_LEFT,
    "Regex is empty": _NOTHING_LEFT,
    "is greater than": _NOTHING_LEFT,
    "min/maxProperties only": _CROWDED,
    "are not disjoint": _OVERLAP,
    "are disjoint": _UNDECIDED,
    "if regex is empty": _UNDECIDED,
    "circular references": _CIRCLE,
    "Unicode property": _PROPERTY,
    "too many states": TOO_MANY_STATES,
    "too many expressions": TOO_MANY_STATES,
    "too many": TOO_EXPENSIVE,
    "too large": TOO_EXPENSIVE,
    "too big": TOO_EXPENSIVE,
    "too deep": TOO_EXPENSIVE,
    "exceed": TOO_EXPENSIVE,
    "limit": TOO_EXPENSIVE,
    "fuel": TOO_EXPENSIVE,
}


def grammar_error(message: str) -> str:
    """Return the sentence for llguidance's message, and log the message."""
    if message == TOO_EXPENSIVE:
        return message
    logger.info("grammar refused: %s", " ".join(message.split())[:_LOGGED_CHARACTERS])
    return next((sentence for part, sentence in _SENTENCES.items() if part in message), _UNKNOWN)
