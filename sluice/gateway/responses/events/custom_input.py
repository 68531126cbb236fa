"""The input of a custom tool's call, read from the arguments of its function while the model writes them."""

import json
import re

from sluice.gateway.responses.request.tools import INPUT

_OPENING = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
_MAY_OPEN = 64  # characters after which arguments that have not opened the string are not of the expected form
# Whole characters of a JSON string: a pair of surrogates is one, and half of a pair is not yet any.
_CHARACTERS = re.compile(
    r'(?:[^"\\]'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt])*'
)


class InputText:
    """Decodes the string of `{"input": "..."}` piece by piece. The arguments of another form have no pieces."""

    def __init__(self) -> None:
        self._pending = ""  # JSON that is not decoded yet
        self._is_open = False
        self._has_ended = False
        self._decoded = list[str]()

    @property
    def text(self) -> str:
        """The input so far."""
        return "".join(self._decoded)

    def feed(self, written: str) -> str:
        """Add a piece of the arguments, and return what it adds to the input."""
        if self._has_ended:
            return ""
        self._pending += written
        if not self._is_open and not self._open():
            return ""
        characters = _CHARACTERS.match(self._pending)
        assert characters is not None, "the expression matches the empty string"
        self._pending = self._pending[characters.end() :]
        self._has_ended = self._pending.startswith('"')
        more: str = json.loads(f'"{characters[0]}"', strict=False)
        self._decoded.append(more)
        return more

    def _open(self) -> bool:
        opening = _OPENING.match(self._pending)
        if opening is None:
            self._has_ended = len(self._pending) > _MAY_OPEN
            return False
        self._pending = self._pending[opening.end() :]
        self._is_open = True
        return True


def whole_input(arguments: str, so_far: str) -> str:
    """Return the input of complete arguments; of others, what could be decoded so far, or else the text itself."""
    try:
        parsed = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return so_far or arguments
    if isinstance(parsed, dict) and isinstance(parsed.get(INPUT), str):
        return str(parsed[INPUT])
    return arguments
