"""A client's JSON Schema, and the error for one that cannot be enforced."""

import json
from typing import Any

Schema = dict[str, Any]

_PLACE_CHARACTERS = 120
_SHOWN_CHARACTERS = 60
_TOO_LONG = 10**_SHOWN_CHARACTERS


class UnsupportedKeyword(ValueError):
    """A keyword cannot be enforced. `place`: its JSON pointer. `reason`: what is wrong, and what to do."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(place, reason)
        self.place, self.reason = place, reason

    def __str__(self) -> str:
        is_short = len(self.place) <= _PLACE_CHARACTERS
        return f"{self.place if is_short else '…' + self.place[-_PLACE_CHARACTERS:]}: {self.reason}"


def quoted(value: object) -> str:
    """Return a client's value in a form that is short and printable enough for an error message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= _TOO_LONG:
        return f"a whole number of over {_SHOWN_CHARACTERS} digits"
    text = value if isinstance(value, str) else json.dumps(value)
    text = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[:200])
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
