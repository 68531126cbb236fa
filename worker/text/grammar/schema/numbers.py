"""Bounds of numbers, as llguidance (1.9) can hold them exactly.

It reads every bound as a double and computes with 64-bit integers. A bound that no 64-bit integer can break becomes the
outermost one that both can express. Any other bound that a double does not hold exactly is refused.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from worker.text.grammar.schema.unsupported import UnsupportedKeyword, shown

Schema = dict[str, Any]
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
EXACT = 2**53
_INT64_LEAST, _INT64_MOST = -(2**63), 2**63 - 1
_LEAST_INTEGER = -(2**63) + 1024  # the double above -2**63, whose opposite overflows in llguidance
_MOST_INTEGER = _INT64_MOST  # read as 2**63, and saturated to 2**63 - 1
_LEAST_NUMBER, _MOST_NUMBER = -9 * 10**18, 9 * 10**18  # of one digit and zeros, as llguidance prints them
_NEARBY = Fraction(1, 10**9)
_EXACT_POWER = 22  # of ten: beyond it, or with more digits than EXACT has, llguidance may read the double beside
_MULTIPLE_DIGITS = 2**32


def bounds(schema: Schema, *, integer: bool, at: str) -> Schema:
    """Return the bounds to put in place of the schema's own. `integer`: no other number satisfies the schema."""
    low, high = _limits(schema, at)
    if integer:
        return _integers(_up(low), _down(high), at)
    return _numbers(low, high, at)


class _Limit:
    """One end of a range: the client's `keyword` stands behind it."""

    def __init__(self, value: Fraction, excluded: bool, keyword: str) -> None:
        self.value, self.excluded, self.keyword = value, excluded, keyword


def _limits(schema: Schema, at: str) -> tuple[_Limit | None, _Limit | None]:
    low = _limit(schema, "minimum", "exclusiveMinimum", at)
    high = _limit(schema, "maximum", "exclusiveMaximum", at)
    if low and high and (low.value > high.value or (low.value == high.value and (low.excluded or high.excluded))):
        raise UnsupportedKeyword(f"{at}/{low.keyword}", f"nothing is within it and {high.keyword}; widen one of them")
    return low, high


def _limit(schema: Schema, included: str, excluded: str, at: str) -> _Limit | None:
    """Return the tighter of two keywords. As a boolean the second says that the first is excluded (draft 4)."""
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
        raise UnsupportedKeyword(f"{at}/{keyword}", f"{shown(value)} is no number; give a number")
    return Fraction(value)


def _is_finite(value: int | float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def _up(limit: _Limit | None) -> _Limit | None:
    """Return the least integer that is allowed."""
    if limit is None:
        return None
    least = math.floor(limit.value) + 1 if limit.excluded else math.ceil(limit.value)
    return _Limit(Fraction(least), False, limit.keyword)


def _down(limit: _Limit | None) -> _Limit | None:
    if limit is None:
        return None
    most = math.ceil(limit.value) - 1 if limit.excluded else math.floor(limit.value)
    return _Limit(Fraction(most), False, limit.keyword)


def _integers(low: _Limit | None, high: _Limit | None, at: str) -> Schema:
    if low and high and low.value > high.value:
        raise UnsupportedKeyword(
            f"{at}/{low.keyword}", f"no integer is within it and {high.keyword}; widen one of them"
        )
    least = _outermost(low, _INT64_LEAST, _LEAST_INTEGER, at)
    most = _outermost(high, _INT64_MOST, _MOST_INTEGER, at)
    # llguidance cannot leave the other end open so far out.
    if least is not None and least > EXACT and most is None:
        most = _MOST_INTEGER
    if most is not None and most < -EXACT and least is None:
        least = _LEAST_INTEGER
    return _written(minimum=least, maximum=most)


def _outermost(limit: _Limit | None, unbreakable: int, instead: int, at: str) -> int | None:
    """Return the bound, or `instead` of one that no 64-bit integer can break."""
    if limit is None:
        return None
    value = int(limit.value)
    if abs(value) <= EXACT:
        return value
    if value <= unbreakable if unbreakable < 0 else value >= unbreakable:
        return instead
    if not _INT64_LEAST <= value <= _INT64_MOST:
        raise UnsupportedKeyword(
            f"{at}/{limit.keyword}", f"no 64-bit integer can satisfy {shown(value)}; use a nearer bound"
        )
    if int(float(value)) != value or value == _INT64_LEAST:
        raise _inexact(limit, at)
    return value


def _numbers(low: _Limit | None, high: _Limit | None, at: str) -> Schema:
    """Return the bounds of what need not be an integer."""
    low, high = _nearer(low, _LEAST_NUMBER, at), _nearer(high, _MOST_NUMBER, at)
    if low and high is None and low.value > EXACT:
        high = _Limit(Fraction(_MOST_NUMBER), False, low.keyword)
    if high and low is None and high.value < -EXACT:
        low = _Limit(Fraction(_LEAST_NUMBER), False, high.keyword)
    # An excluded whole number is let through where the range ends within the same unit.
    if low and high and high.value - low.value < 1:
        low, high = _inwards(low, _NEARBY), _inwards(high, -_NEARBY)
    return {**_end(low, "minimum", "exclusiveMinimum", at), **_end(high, "maximum", "exclusiveMaximum", at)}


def _nearer(limit: _Limit | None, outermost: int, at: str) -> _Limit | None:
    if limit is None or abs(limit.value) < EXACT:
        return limit
    if limit.value <= outermost if outermost < 0 else limit.value >= outermost:
        return _Limit(Fraction(outermost), False, limit.keyword)
    if abs(limit.value) > _MOST_NUMBER:
        raise UnsupportedKeyword(f"{at}/{limit.keyword}", "a bound so far out cannot be held; use one within 9e18")
    # As it is printed: the shortest digits that name the double, then zeros.
    if limit.excluded or limit.value.denominator != 1 or Fraction(repr(float(limit.value))) != limit.value:
        raise _inexact(limit, at)
    return limit


def _inwards(limit: _Limit, by: Fraction) -> _Limit:
    """Move an excluded end into the range, in decimal digits: 1.6 + 1e-9 in doubles has too many to be read exactly."""
    return _Limit(Fraction(repr(float(limit.value))) + by, True, limit.keyword) if limit.excluded else limit


def _end(limit: _Limit | None, included: str, excluded: str, at: str) -> Schema:
    if limit is None:
        return {}
    value = int(limit.value) if limit.value.denominator == 1 else float(limit.value)
    if not _is_read_exactly(value) or abs(Fraction(repr(value)) - limit.value) > _NEARBY / 2**10:
        raise UnsupportedKeyword(f"{at}/{limit.keyword}", "a bound of so many digits cannot be held exactly; round it")
    return {excluded if limit.excluded else included: value}


def _is_read_exactly(value: int | float) -> bool:
    if isinstance(value, int):
        return True
    _, digits, power = Decimal(repr(value)).as_tuple()
    return int("".join(map(str, digits))) <= EXACT and abs(int(power)) <= _EXACT_POWER


def _inexact(limit: _Limit, at: str) -> UnsupportedKeyword:
    instead = "use one within ±2**53, or one that every 64-bit integer satisfies"
    return UnsupportedKeyword(f"{at}/{limit.keyword}", f"a bound beyond 2**53 cannot be held exactly; {instead}")


def _written(**values: int | None) -> Schema:
    return {keyword: value for keyword, value in values.items() if value is not None}


def multiple(value: Any, at: str) -> int | float:
    """Return a `multipleOf` that llguidance reads as it was meant: it takes a fraction's digits by multiplying."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MULTIPLE_DIGITS:
        raise UnsupportedKeyword(
            f"{at}/multipleOf", f"{shown(value)} cannot be held; use a number above 0 and below 2**32"
        )
    digits = float(value)
    while digits % 1 and digits < _MULTIPLE_DIGITS:
        digits *= 10
    if digits >= _MULTIPLE_DIGITS or not _is_read_exactly(value):
        raise UnsupportedKeyword(f"{at}/multipleOf", f"{shown(value)} has too many digits; round it")
    return value


def check_multiples(places: Mapping[Fraction, str]) -> None:
    """Refuse multiples, by the places where they stand, of which llguidance cannot compute a common one."""
    common, finest = Fraction(1), max((each.denominator for each in places), default=1)
    for value, at in places.items():
        common *= value * finest
        if common >= _MULTIPLE_DIGITS:
            raise UnsupportedKeyword(
                f"{at}/multipleOf", "together with the others it is too large to be held; use smaller ones"
            )


def check_value(value: int | float, at: str) -> None:
    """Refuse a number of an `enum` or a `const` that would be written as another one."""
    if not _is_finite(value):
        raise UnsupportedKeyword(at, f"{shown(value)} is no number; leave it out")
    if not _is_read_exactly(value):
        raise UnsupportedKeyword(at, f"{shown(value)} has too many digits to be written exactly; round it")
    if abs(value) <= EXACT or (abs(value) < _INT64_MOST and isinstance(value, int) and int(float(value)) == value):
        return
    raise UnsupportedKeyword(at, f"{shown(value)} cannot be written exactly; use numbers within ±2**53, or strings")
