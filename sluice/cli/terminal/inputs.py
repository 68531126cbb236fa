"""Reads requests from the command line, stdin and files."""

import base64
import json
import mimetypes
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from sluice.cli.errors import CliError
from sluice.wording import json_problem

_IMAGE_LIMIT = "SLUICE_IMAGE_MAX_BYTES"  # the worker's setting: largest image file in bytes


def read_message(argument: str) -> str:
    """Return the message; `-` reads stdin. Raises `CliError`."""
    message = read_text("-").rstrip("\n") if argument == "-" else argument
    if not message.strip():
        raise CliError("the message is empty: give a text.")
    return message


def read_image(path: str) -> str:
    """Return an image file as a data: URL. Raises `CliError`."""
    kind, _ = mimetypes.guess_type(path)
    if kind is None or not kind.startswith("image/"):
        raise CliError(f"{path} does not look like an image: its name must end in .png, .jpg, .webp or .gif.")
    max_bytes = _max_image_bytes()
    try:
        raw = _read_image_file(path, max_bytes)
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}.") from None
    if len(raw) > max_bytes:
        raise CliError(
            f"{path} is larger than {max_bytes:,} bytes, the limit of the workers: make it smaller. If the "
            f"workers have a higher {_IMAGE_LIMIT}, set the same here."
        )
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def _read_image_file(path: str, max_bytes: int) -> bytes:
    """Read up to `max_bytes` + 1 bytes of a regular file: a device may have no end, and a pipe no writer. Raises
    `CliError` or OSError."""
    file_path = Path(path)
    if file_path.exists() and not file_path.is_file() and not file_path.is_dir():
        raise CliError(f"{path} is not a regular file: give one.")
    with file_path.open("rb") as file:
        return file.read(max_bytes + 1)


def _max_image_bytes() -> int:
    """Return the limit that workers with the settings of this environment have. Raises `CliError`."""
    limit = os.environ.get(_IMAGE_LIMIT, "").strip() or "20000000"  # its default
    if not limit.isdecimal() or not 0 < len(limit) < 16:
        raise CliError(f"{_IMAGE_LIMIT} must be a number of bytes; correct or unset it.")
    return int(limit)


def read_request_file(path: str, max_bytes: int | None = None) -> dict[str, Any]:
    """Return the body of a chat completion; the file may hold its messages only. `-` reads stdin. Raises `CliError`."""
    text = read_text(path, max_bytes)
    if not text.strip():
        raise CliError(f"{_name(path)} is empty: give a request as JSON.")
    try:
        body = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CliError(f"{_name(path)} is not JSON: {json_problem(error)}.") from None
    match body:
        case {"messages": _}:
            return dict(body)
        case [{"role": _}, *_]:
            return {"messages": body}
    raise CliError(
        f"{_name(path)} is not a request: it must look like "
        '{"messages": [{"role": "user", "content": "Hello!"}]}, or be a list of such messages.'
    )


def read_text(path: str, max_bytes: int | None = None) -> str:
    """Return the text of a file; `-` reads stdin. Raises `CliError`, also beyond `max_bytes`."""
    limit = 256 * 1024 * 1024 if max_bytes is None else max_bytes  # to queue: workers may have a higher limit
    try:
        raw = sys.stdin.buffer.read(limit + 1) if path == "-" else _read_file(path, limit)
        if len(raw) > limit:
            raise CliError(f"{_name(path)} is larger than the limit of {limit:,} bytes.")
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise CliError(f"cannot read {_name(path)}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CliError(f"{_name(path)} is not UTF-8: {error.reason} at byte {error.start}.") from None


def _read_file(path: str, limit: int) -> bytes:
    """Read up to `limit` + 1 bytes of a file or a pipe, but no device: /dev/zero has no end. Raises `CliError` or
    OSError."""
    if not Path(path).is_dir() and Path(path).exists() and not (Path(path).is_file() or Path(path).is_fifo()):
        raise CliError(f"{path} is neither a file nor a pipe: give one, or `-` to read stdin.")
    with Path(path).open("rb") as file:
        return file.read(limit + 1)


def _name(path: str) -> str:
    return "stdin" if path == "-" else path


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
