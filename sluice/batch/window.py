"""A completion window: "24h"."""

import re

DEFAULT = "24h"

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def seconds(window: str) -> int:
    """Raises ValueError."""
    found = re.fullmatch(r"([1-9]\d{0,8})([smhd])", window, re.ASCII)
    if found is None:
        raise ValueError(f"a completion window is a number of s, m, h or d, such as 24h, and {window!r} is none")
    return int(found[1]) * _UNITS_S[found[2]]
