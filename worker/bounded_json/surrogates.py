"""Finds lone surrogates: JSON escapes can spell them, but UTF-8 text cannot contain them."""

import re
from collections.abc import Iterator
from typing import Any

_PLAIN_NAME = re.compile(r"[\w$-]{1,40}", re.ASCII)


def is_text(value: str) -> bool:
    """True if the string has no lone surrogates, so that UTF-8 can represent it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def first_lone_surrogate(value: Any) -> str | None:
    """Return the path of the first string or name with a lone surrogate, such as `messages[0].content`, or None."""
    return next(_places(value, ""), None)


def _places(value: Any, path: str) -> Iterator[str]:
    match value:
        case str():
            if not is_text(value):
                yield path
        case list():
            for index, item in enumerate(value):
                yield from _places(item, f"{path}[{index}]")
        case dict():
            for name, item in value.items():
                inside = _longer(path, name)
                yield from _places(name, inside)
                yield from _places(item, inside)


def _longer(path: str, name: str) -> str:
    """Append a name to the path, unless it is not a plain word."""
    if not _PLAIN_NAME.fullmatch(name):
        return path
    return f"{path}.{name}" if path else name
