"""Rewrites bounds of numbers so that llguidance (1.9) enforces them exactly.

It parses every bound as a double and computes with 64-bit integers. A bound that every 64-bit integer satisfies becomes
the outermost one that both can represent. Any other bound that a double cannot represent exactly is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from worker.text.grammar.schema.unsupported import Schema, UnsupportedKeyword, quoted

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
EXACT = 2**53
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_MIN_INTEGER = -(2**63) + 1024  # the double above -2**63, which llguidance would negate and overflow
_MAX_INTEGER = _INT64_MAX  # read as 2**63, and saturated to 2**63 - 1
_MIN_NUMBER, _MAX_NUMBER = -9 * 10**18, 9 * 10**18  # of one digit and zeros, as llguidance prints them
_NEARBY = Fraction(1, 10**9)
_MULTIPLE_DIGITS = 2**32


def bounds(schema: Schema, *, integer: bool, at: str) -> Schema:
    """Return the bounds that replace the schema's own. `integer`: only integers satisfy the schema.

    Raises `UnsupportedKeyword`.
    """
    low, high = _limits(schema, at)
    if integer:
        return _integers(_up(low), _down(high), at)
    return _numbers(low, high, at)


@dataclass(frozen=True, slots=True)
class _Limit:
    """One end of a range, and the client's keyword that set it."""

    value: Fraction
    excluded: bool
    keyword: str


def _limits(schema: Schema, at: str) -> tuple[_Limit | None, _Limit | None]:
    low = _limit(schema, "minimum", "exclusiveMinimum", at)
    high = _limit(schema, "maximum", "exclusiveMaximum", at)
    if low and high and (low.value > high.value or (low.value == high.value and (low.excluded or high.excluded))):
        raise UnsupportedKeyword(f"{at}/{low.keyword}", f"no number satisfies it and {high.keyword}; widen one of them")
    return low, high


def _limit(schema: Schema, included: str, excluded: str, at: str) -> _Limit | None:
    """Return the tighter of two keywords. In draft 4 the second is a boolean: the first one's value is excluded."""
    value, other = _number(schema, included, at), schema.get(excluded)
    if isinstance(other, bool):
        return None if value is None else _Limit(value, other, included)
    beyond = _number(schema, excluded, at)
    if beyond is None:
        return None if value is None else _Limit(value, False, included)
    if value is None or (beyond >= value if included == "minimum" else beyond <= value):
        return _Limit(beyond, True, excluded)
    return _Limit(value, False, included)


def _number(schema: Schema, keyword: str, at: str) -> Fraction | None:
    if keyword not in schema:
        return None
    value = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise UnsupportedKeyword(f"{at}/{keyword}", f"{quoted(value)} is not a number; send a number")
    return Fraction(value)


def _is_finite(value: int | float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def _up(limit: _Limit | None) -> _Limit | None:
    """Return the lowest allowed integer as a limit."""
    if limit is None:
        return None
    minimum = math.floor(limit.value) + 1 if limit.excluded else math.ceil(limit.value)
    return _Limit(Fraction(minimum), False, limit.keyword)


def _down(limit: _Limit | None) -> _Limit | None:
    """Return the highest allowed integer as a limit."""
    if limit is None:
        return None
    maximum = math.ceil(limit.value) - 1 if limit.excluded else math.floor(limit.value)
    return _Limit(Fraction(maximum), False, limit.keyword)


def _integers(low: _Limit | None, high: _Limit | None, at: str) -> Schema:
    if low and high and low.value > high.value:
        raise UnsupportedKeyword(
            f"{at}/{low.keyword}", f"no integer satisfies it and {high.keyword}; widen one of them"
        )
    minimum = _outermost(low, _INT64_MIN, _MIN_INTEGER, at)
    maximum = _outermost(high, _INT64_MAX, _MAX_INTEGER, at)
    # llguidance cannot leave the other end open if this one is beyond 2**53.
    if minimum is not None and minimum > EXACT and maximum is None:
        maximum = _MAX_INTEGER
    if maximum is not None and maximum < -EXACT and minimum is None:
        minimum = _MIN_INTEGER
    return _written(minimum=minimum, maximum=maximum)


def _outermost(limit: _Limit | None, unbreakable: int, instead: int, at: str) -> int | None:
    """Return the bound, or `instead` if every 64-bit integer satisfies it. `unbreakable`: the first such bound."""
    if limit is None:
        return None
    value = int(limit.value)
    if abs(value) <= EXACT:
        return value
    if value <= unbreakable if unbreakable < 0 else value >= unbreakable:
        return instead
    if not _INT64_MIN <= value <= _INT64_MAX:
        raise UnsupportedKeyword(
            f"{at}/{limit.keyword}", f"no 64-bit integer satisfies {quoted(value)}; use a bound nearer to 0"
        )
    if int(float(value)) != value or value == _INT64_MIN:
        raise _inexact(limit, at)
    return value


def _numbers(low: _Limit | None, high: _Limit | None, at: str) -> Schema:
    """Return the bounds of numbers that need not be integers."""
    low, high = _nearer(low, _MIN_NUMBER, at), _nearer(high, _MAX_NUMBER, at)
    # An end that is open would allow more digits than a double holds.
    if low and high is None:
        high = _Limit(Fraction(_MAX_NUMBER), False, low.keyword)
    if high and low is None:
        low = _Limit(Fraction(_MIN_NUMBER), False, high.keyword)
    # llguidance accepts an excluded whole number if the range ends less than 1 away from it.
    if low and high and high.value - low.value < 1:
        low, high = _inwards(low, _NEARBY), _inwards(high, -_NEARBY)
    return {**_end(low, "minimum", "exclusiveMinimum", at), **_end(high, "maximum", "exclusiveMaximum", at)}


def _nearer(limit: _Limit | None, outermost: int, at: str) -> _Limit | None:
    if limit is None or abs(limit.value) < EXACT:
        return limit
    if limit.value <= outermost if outermost < 0 else limit.value >= outermost:
        return _Limit(Fraction(outermost), False, limit.keyword)
    if abs(limit.value) > _MAX_NUMBER:
        raise UnsupportedKeyword(f"{at}/{limit.keyword}", "so large a bound is not supported; use one within ±9e18")
    # llguidance prints the shortest digits of the double, then zeros.
    if limit.excluded or limit.value.denominator != 1 or Fraction(repr(float(limit.value))) != limit.value:
        raise _inexact(limit, at)
    return limit


def _inwards(limit: _Limit, by: Fraction) -> _Limit:
    """Move an excluded end into the range, in decimal: as a double, 1.6 + 1e-9 has too many digits."""
    return _Limit(Fraction(repr(float(limit.value))) + by, True, limit.keyword) if limit.excluded else limit


def _end(limit: _Limit | None, included: str, excluded: str, at: str) -> Schema:
    if limit is None:
        return {}
    value = int(limit.value) if limit.value.denominator == 1 else float(limit.value)
    if not _is_read_exactly(value) or abs(Fraction(repr(value)) - limit.value) > _NEARBY / 2**10:
        raise UnsupportedKeyword(
            f"{at}/{limit.keyword}", "a bound of so many digits cannot be enforced exactly; round it"
        )
    return {excluded if limit.excluded else included: value}


def _is_read_exactly(value: int | float) -> bool:
    if isinstance(value, int):
        return True
    _, digits, power = Decimal(repr(value)).as_tuple()
    # Beyond this power of ten, or with more digits, llguidance may parse a neighbouring double.
    return int("".join(map(str, digits))) <= EXACT and abs(int(power)) <= 22


def _inexact(limit: _Limit, at: str) -> UnsupportedKeyword:
    instead = "use one within ±2**53, or one that every 64-bit integer satisfies"
    return UnsupportedKeyword(f"{at}/{limit.keyword}", f"a bound beyond 2**53 cannot be enforced exactly; {instead}")


def _written(**values: int | None) -> Schema:
    return {keyword: value for keyword, value in values.items() if value is not None}


def multiple(value: Any, at: str) -> int | float:
    """Return `multipleOf` if llguidance parses it exactly: it multiplies a fraction by ten until it is whole.

    Raises `UnsupportedKeyword`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MULTIPLE_DIGITS:
        raise UnsupportedKeyword(
            f"{at}/multipleOf", f"{quoted(value)} is not supported; use a number above 0 and below 2**32"
        )
    digits = float(value)
    while digits % 1 and digits < _MULTIPLE_DIGITS:
        digits *= 10
    if digits >= _MULTIPLE_DIGITS or not _is_read_exactly(value):
        raise UnsupportedKeyword(f"{at}/multipleOf", f"{quoted(value)} has too many digits; round it")
    return value


def check_multiples(places: Mapping[Fraction, str]) -> None:
    """Refuse multiples whose common multiple llguidance cannot compute. `places`: the JSON pointer of each."""
    common = Fraction(1)
    finest = max((each.denominator for each in places), default=1)
    for value, at in places.items():
        common *= value * finest
        if common >= _MULTIPLE_DIGITS:
            raise UnsupportedKeyword(
                f"{at}/multipleOf", "its common multiple with the others is too large; use smaller ones"
            )


def check_value(value: int | float, at: str) -> None:
    """Refuse a number of an `enum` or a `const` that an answer would write as another number."""
    if not _is_finite(value):
        raise UnsupportedKeyword(at, f"{quoted(value)} is not a number; leave it out")
    if not _is_read_exactly(value):
        raise UnsupportedKeyword(at, f"{quoted(value)} has too many digits to be written exactly; round it")
    if abs(value) <= EXACT or (abs(value) < _INT64_MAX and isinstance(value, int) and int(float(value)) == value):
        return
    raise UnsupportedKeyword(at, f"{quoted(value)} cannot be written exactly; use numbers within ±2**53, or strings")
