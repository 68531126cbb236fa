"""Files that are being written. Each is locked by its writer, so that the files of dead writers are recognized."""

import fcntl
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


class _CountingFile(io.BufferedWriter):
    """Counts what is written, and bytes that are written again once more."""

    written_bytes = 0

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self.written_bytes += written
        return written


class UnfinishedFile:
    """A file that has its final size from the start, so that it counts as what it will take. Its content is written
    without the folder's lock."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Create the file, which must not exist. Requires the folder's lock: no other process finds it before it is
        locked. Raises OSError."""
        self.path = path
        self.nbytes = nbytes
        self.file = _CountingFile(io.FileIO(path, "xb"))
        try:
            os.chmod(self.file.fileno(), 0o600)  # prompts are private
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.file.truncate(nbytes)
        except OSError:
            self.close()
            raise

    @property
    def missing_bytes(self) -> int:
        """Bytes that have not been written."""
        return max(0, self.nbytes - self.file.written_bytes)

    def sync(self) -> None:
        """Make the content durable. Blocks. Raises OSError."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def finish(self, path: Path) -> None:
        """Let the file appear under its final name. Raises OSError."""
        self.path.rename(path)

    def close(self) -> None:
        """Close the file, and remove it unless it is finished. Raises no OSError."""
        with suppress(OSError):
            self.file.close()
        with suppress(OSError):
            self.path.unlink()


def is_abandoned(path: Path) -> bool:
    """Return True if no living process writes the file, or if it is gone. Requires the folder's lock."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:  # of another user: it counts until that one removes it
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True
