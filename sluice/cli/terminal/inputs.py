"""Reads requests from the command line, stdin and files."""

import base64
import json
import mimetypes
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from sluice.cli.errors import CliError

_MOST_BYTES = 256 * 1024 * 1024  # far more than workers take, unless their SLUICE_MAX_REQUEST_BYTES says otherwise
_IMAGE_LIMIT = "SLUICE_IMAGE_MAX_BYTES"  # the worker's setting; the most bytes of an image file
_MOST_IMAGE_BYTES = 20_000_000  # its default


def read_message(given: str) -> str:
    """Return the message; `-` reads stdin. Raises `CliError`."""
    message = _text("-").rstrip("\n") if given == "-" else given
    if not message.strip():
        raise CliError("the message is empty; there is nothing to answer.")
    return message


def read_image(path: str) -> str:
    """Return an image file as a data: URL. Raises `CliError`."""
    kind, _ = mimetypes.guess_type(path)
    if kind is None or not kind.startswith("image/"):
        raise CliError(f"{path} does not look like an image: its name must end in .png, .jpg, .webp or .gif.")
    most_bytes = _most_image_bytes()
    try:
        raw = _read_image_file(path, most_bytes)
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}.") from None
    if len(raw) > most_bytes:
        raise CliError(
            f"{path} is larger than {most_bytes:,} bytes, the most that a worker takes: make it smaller. If your "
            f"workers take more, set {_IMAGE_LIMIT} here to what it is there."
        )
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def _read_image_file(path: str, most_bytes: int) -> bytes:
    """Read up to a byte more than `most_bytes`. A device may have no end, and a pipe no writer. Raises OSError."""
    place = Path(path)
    if place.exists() and not place.is_file() and not place.is_dir():
        raise CliError(f"{path} is not a file: an image is read from a file only.")
    with place.open("rb") as file:
        return file.read(most_bytes + 1)


def _most_image_bytes() -> int:
    """Return the limit that workers have if they are set up as this environment says."""
    given = os.environ.get(_IMAGE_LIMIT, "").strip() or str(_MOST_IMAGE_BYTES)
    if not given.isdecimal() or not 0 < len(given) < 16:
        raise CliError(f"{_IMAGE_LIMIT} must be a number of bytes; correct or unset it.")
    return int(given)


def read_request(path: str) -> dict[str, Any]:
    """Return the body of a chat completion, which may be given as its messages only. `-` reads stdin. Raises
    `CliError`."""
    try:
        said = json.loads(_text(path), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CliError(f"{_name(path)} is not JSON: {error}.") from None
    match said:
        case {"messages": _}:
            return dict(said)
        case [*messages]:
            return {"messages": messages}
    raise CliError(
        f'{_name(path)} holds no request: it must look like {{"messages": [{{"role": "user", "content": "Hello!"}}]}}.'
    )


def _text(path: str) -> str:
    try:
        raw = _read_bounded(sys.stdin.buffer) if path == "-" else _read_file(path)
        if len(raw) > _MOST_BYTES:
            raise CliError(f"{_name(path)} is larger than {_MOST_BYTES:,} bytes, the most that is read.")
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise CliError(f"cannot read {_name(path)}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CliError(f"{_name(path)} is not UTF-8: {error.reason} at byte {error.start}.") from None


def _read_file(path: str) -> bytes:
    """Read a file or a pipe. A device such as /dev/zero has no end. Raises OSError."""
    if not Path(path).is_dir() and Path(path).exists() and not (Path(path).is_file() or Path(path).is_fifo()):
        raise CliError(f"{path} is neither a file nor a pipe: name one, or pipe the text and give `-`.")
    with Path(path).open("rb") as file:
        return _read_bounded(file)


def _read_bounded(file: BinaryIO) -> bytes:
    return file.read(_MOST_BYTES + 1)


def _name(path: str) -> str:
    return "stdin" if path == "-" else path


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which JSON has no word for")
