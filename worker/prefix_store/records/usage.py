"""What records have in common: they are small and written as a whole, and damaged ones count as empty."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from worker.prefix_store.files.names import TEMPORARY
from worker.prefix_store.folder.scan import Scan

_MAX_BYTES = 1 << 20  # a larger file is none of ours


class UsageRecord(Protocol):
    """A record that a worker keeps in the folder."""

    def renew(self, folder: Path, scan: Scan, room_bytes: int) -> dict[str, int]:
        """Bring the record up to date, if it grows by `room_bytes` at most. Returns the bytes of each file that has
        changed, 0 if it was removed. Requires the folder's lock. Raises OSError."""

    def end(self, folder: Path, room_bytes: int) -> None:
        """Leave the record as it is to be while the worker does not run. Requires the folder's lock. Raises OSError."""


def write_record(path: Path, content: str, room_bytes: int | None = None) -> bool:
    """Write a record as a whole, readable by its owner only. Returns False, and leaves it as it was, if it grows by
    more than `room_bytes`; None: no limit. Raises OSError."""
    if room_bytes is not None:
        with suppress(FileNotFoundError):
            room_bytes += path.stat().st_size
        if len(content.encode()) > room_bytes:
            return False
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    temporary.touch(mode=0o600)
    temporary.write_text(content, "utf-8")
    temporary.rename(path)
    return True


def read_record(path: Path) -> dict[str, Any]:
    """Return the content of a record; an empty one if it is missing, damaged or cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= _MAX_BYTES:
            content = json.loads(path.read_text("utf-8"))
            return content if isinstance(content, dict) else {}
    return {}


def is_count(value: object) -> bool:
    """Return True for a number of bytes, hits or uses, as JSON gives it."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
