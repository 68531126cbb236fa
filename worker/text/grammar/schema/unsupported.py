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
        short = place if len(place) <= _PLACE_CHARACTERS else "…" + place[-_PLACE_CHARACTERS:]
        super().__init__(f"{short}: {reason}")
        self.place, self.reason = place, reason


def quoted(value: object) -> str:
    """Return a client's value in a form that is short and printable enough for an error message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= _TOO_LONG:
        return f"a whole number of over {_SHOWN_CHARACTERS} digits"
    text = value if isinstance(value, str) else json.dumps(value)
    text = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[:200])
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
