"""Reads one message, of one or several lines, at the prompt."""

import select
import sys

try:
    import readline  # input() then edits the line and remembers the ones before
except ImportError:
    pass
else:
    # A pasted text stays in the line that is edited until Enter is pressed. Python turns this off; macOS's libedit has
    # nothing like it, and its pastes are put together below.
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")

_PROMPT, _MORE = "> ", "... "
_QUOTES = '"""'
_PASTE_S = 0.05  # in which the next line of a pasted text is there


def read_typed() -> str | None:
    """The message; empty after Ctrl-C, None after Ctrl-D."""
    try:
        first = input(_PROMPT)
        return _quoted(first) if first.lstrip().startswith(_QUOTES) else _lines(first)
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _quoted(first: str) -> str:
    """All up to the next three quotes. A text that was pasted may be one of several lines already."""
    text = first.lstrip().removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        text += "\n" + input(_MORE)
    return text.rstrip().removesuffix(_QUOTES).strip("\n")


def _lines(first: str) -> str:
    """A backslash at the end goes on with the next line. So does a pasted text that comes as lines of its own, until
    a line is entered by hand: nothing is sent that was not seen."""
    lines = [first]
    while True:
        is_pasted = False
        while _another_waits():
            lines.append(input(_MORE))
            is_pasted = True
        if is_pasted:
            lines.append(input(_MORE))
        elif lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(input(_MORE))
        else:
            return "\n".join(lines).rstrip("\n")


def _another_waits() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], _PASTE_S)
    return bool(ready)
