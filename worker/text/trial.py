"""Grammars, compiled by llguidance. What a client sends is tried first, by a process of its own: see `attempt`.

A schema can overflow the compiler's stack, which ends the process, or keep it busy for minutes and fill gigabytes
meanwhile. llguidance (1.9) has limits for neither, but a process can be ended.
"""

import random

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# States take some 2 kB each. A row of so many items, of some 1,500 optional properties, takes a mask 20 ms.
_LIMITS = LLParserLimits(max_lexer_states=50_000, max_items_in_row=6_000, verbose_errors=False)
_AHEAD = 8  # tokens: where a schema is too much for llguidance, that mostly shows at once


class Uncompilable(ValueError):
    """In llguidance's words."""


def compiled(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Raises `Uncompilable`."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    _go_ahead(matcher)  # only this finds out that nothing satisfies a schema
    if wrong := error_of(matcher):
        raise Uncompilable(wrong)
    return matcher


def _go_ahead(matcher: LLMatcher) -> None:
    """A few tokens, and back."""
    dice = random.Random(0)
    for _ in range(_AHEAD):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        if not matcher.is_error():
            matcher.consume_token(_one_of(mask, dice))
    if not matcher.is_error():
        matcher.reset()


def _one_of(mask: bytes, dice: random.Random) -> int:
    """Of the tokens that it allows."""
    begin = dice.randrange(len(mask))
    turned = (mask[begin:] + mask[:begin]).lstrip(b"\0")
    place = (begin + len(mask) - len(turned)) % len(mask)
    return place * 8 + (mask[place] & -mask[place]).bit_length() - 1


def error_of(matcher: LLMatcher) -> str | None:
    return matcher.get_error().removesuffix("<non-verbose/>").strip() if matcher.is_error() else None
