"""Parses JSON strictly by its standard, with a message for anything else."""

import json
import re
from math import isfinite
from typing import Any, NoReturn

_MOST_DIGITS = 4300  # Python's own limit for the text of a whole number
_ECHOED = 20  # characters
_NOT_JSON = (
    "The job's body is not JSON: give arq's create_pool a JSON job_serializer, for example "
    "lambda job: json.dumps(job).encode()."
)
TOO_DEEP = "The job's body is nested too deeply to be read; nest its lists and objects at most 64 levels deep."


class NotJson(ValueError):
    """The body is not valid JSON. The message is for the client."""


def loads(raw: bytes) -> Any:
    """Parse UTF-8 JSON with finite numbers. Raises `NotJson`."""
    try:
        return json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole_number
        )
    except NotJson:
        raise
    except RecursionError:
        raise NotJson(TOO_DEEP) from None
    except ValueError:  # not UTF-8 is one too
        raise NotJson(_NOT_JSON) from None


def _refuse_constant(name: str) -> NoReturn:
    raise NotJson(f"The request holds {name}, which is not JSON; send a number or null instead.")


def _finite(digits: str) -> float:
    """Parse a finite number: 1e999 would become infinity, which JSON cannot represent."""
    number = float(digits)
    if not isfinite(number):
        raise NotJson(f"The request holds the number {_short(digits)}; numbers go up to 1.8e308.")
    return number


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise NotJson(
            f"The request holds a whole number of {len(digits):,} digits; send one of at most {_MOST_DIGITS:,}, "
            "or a string."
        )
    return int(digits)


def _short(digits: str) -> str:
    """Return the digits; of a long number, the beginning and the exponent."""
    if len(digits) <= _ECHOED:
        return digits
    exponent = re.search(r"[eE][+-]?\d{1,6}$", digits)
    return f"{digits[: _ECHOED // 2]}...{exponent[0] if exponent else ''}"
