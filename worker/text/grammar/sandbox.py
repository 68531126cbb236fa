"""Compiles grammars with llguidance. A client's grammar is first compiled in a child process: see `trial`.

A schema can overflow the compiler's stack, which ends the process, or occupy it for minutes and fill gigabytes of
memory. llguidance (1.9) limits neither, but a child process can be limited and killed.
"""

import random

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# A state takes about 2 kB. With 6,000 items in a row, as for 1,500 optional properties, a mask takes 20 ms, and so does
# one that creates expressions for two million units of fuel.
_LIMITS = LLParserLimits(
    max_lexer_states=50_000, max_items_in_row=6_000, step_lexer_fuel=2_000_000, verbose_errors=False
)
# Half of it, for `trial`: the other half is left for what real tokens and longer answers visit.
TRIAL_LIMITS = LLParserLimits(
    max_lexer_states=25_000, max_items_in_row=6_000, step_lexer_fuel=1_000_000, verbose_errors=False
)


class Uncompilable(ValueError):
    """The grammar cannot be compiled. The message is llguidance's."""


def compile_twice(vocabulary: LLTokenizer, grammar: str) -> tuple[LLMatcher, LLMatcher]:
    """Return `compile_grammar`, and another matcher that has nothing in common with it: copies of a matcher share its
    lexer and its errors. Raises `Uncompilable`."""
    return compile_grammar(vocabulary, grammar), _compiled(vocabulary, grammar)


def compile_grammar(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar and try its first tokens. Raises `Uncompilable`."""
    matcher = _compiled(vocabulary, grammar)
    _try_tokens(matcher)  # only this detects a schema that nothing satisfies
    if wrong := error_of(matcher):
        raise Uncompilable(wrong)
    return matcher


def _compiled(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    return LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)


def _try_tokens(matcher: LLMatcher) -> None:
    """Consume a few allowed tokens, then reset."""
    dice = random.Random(0)
    for _ in range(8):  # a schema that exceeds llguidance's limits mostly does so within the first ones
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        if not matcher.is_error():
            matcher.consume_token(_random_token(mask, dice))
    if not matcher.is_error():
        matcher.reset()


def _random_token(mask: bytes, dice: random.Random) -> int:
    """Return one of the tokens that the mask allows."""
    begin = dice.randrange(len(mask))
    turned = (mask[begin:] + mask[:begin]).lstrip(b"\0")
    place = (begin + len(mask) - len(turned)) % len(mask)
    return place * 8 + (mask[place] & -mask[place]).bit_length() - 1


def error_of(matcher: LLMatcher) -> str | None:
    """Return the matcher's error, or None."""
    return matcher.get_error().removesuffix("<non-verbose/>").strip() if matcher.is_error() else None
