"""Reads a message of one or more lines at the prompt."""

import select
import sys

try:
    import readline  # gives input() line editing and a history
except ImportError:
    pass
else:
    # With bracketed paste, a pasted text is edited as one line until Enter is pressed. Python disables it. macOS's
    # libedit lacks it, so `_read_lines` joins its pasted lines.
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")

_PROMPT, _CONTINUATION = "> ", "... "
_QUOTES = '"""'
_PASTE_S = 0.05  # within which the next line of a pasted text arrives


def read_typed() -> str | None:
    """Read a message from the terminal; empty after Ctrl-C, None after Ctrl-D."""
    try:
        first = input(_PROMPT)
        return _read_quoted(first) if first.lstrip().startswith(_QUOTES) else _read_lines(first)
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _read_quoted(first: str) -> str:
    """Return the text up to the closing quotes. `first` may already have several lines, if it was pasted."""
    text = first.lstrip().removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        text += "\n" + input(_CONTINUATION)
    return text.rstrip().removesuffix(_QUOTES).strip("\n")


def _read_lines(first: str) -> str:
    """Return the message that begins with `first`. A line that ends in a backslash continues on the next one.

    Pasted lines that arrive separately continue until a line is typed, so that the user confirms what is sent.
    """
    lines = [first]
    while True:
        is_pasted = False
        while _is_input_pending():
            lines.append(input(_CONTINUATION))
            is_pasted = True
        if is_pasted:
            lines.append(input(_CONTINUATION))
        elif lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(input(_CONTINUATION))
        else:
            return "\n".join(lines).rstrip("\n")


def _is_input_pending() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], _PASTE_S)
    return bool(ready)
