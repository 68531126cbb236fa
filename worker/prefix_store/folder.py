"""The folder: its quota, and files that are written as a whole or not at all.

Several processes share it. One that removes for space, reserves the bytes of a new file, or lets a finished one appear
holds a lock on the folder, so that together they keep the quota. To write content and to read, no lock is needed."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from worker.prefix_store.encryption import Encryption
from worker.prefix_store.format import StoredSegment, encoded_size, write_segment
from worker.prefix_store.names import LOCK, TEMPORARY, WRITTEN, FileName, pin_of
from worker.prefix_store.records import ModelRecord
from worker.prefix_store.scan import Scan, scan_folder
from worker.prefix_store.unfinished import UnfinishedFile, is_abandoned
from worker.schedule.cache.disk import NotStored, files_to_remove, fits_budget

_DAY_S = 86_400
_SCAN_S = 5.0  # files of others are counted again after this time; those of other workers at each write


class Unwritable(Exception):
    """A file could not be written: the disk is full, or the folder is gone."""


class Folder:
    """A folder of segments. `path`, `remove`, `touch` and `leave_alone` may be used on any thread, everything else on
    one."""

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        daily_bytes: int | None = None,
        encryption: Encryption | None = None,
        record: ModelRecord | None = None,
    ) -> None:
        """`max_bytes`: of all files in the folder together, also those of others. `daily_bytes`: most bytes to write in
        a day; None: no limit. `encryption`: of the files that are written; None: they are plain. `record`: of
        the model in use, renewed by `enforce`. Creates the folder; raises OSError."""
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self._max_bytes = max_bytes
        self._daily_bytes = daily_bytes
        self._encryption = encryption
        self._record = record
        self._writer = f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
        self._changes = count()  # of the folder, by this process
        self._last_record = _Record(0, "")
        self._known: Scan | None = None  # the last scan, with own changes
        self._scanned_s = 0.0
        self._unreadable: dict[FileName, _Identity | None] = {}  # as they were when they could not be read

    def enforce(self) -> None:
        """Scan the folder, and remove unfinished files of writers that have died, and what exceeds the quota. Raises
        OSError."""
        with self._locked():
            if self._record:
                self._record.renew(self.path)
            self._known = None
            self._known = self._enforced(0)

    def write(
        self,
        name: FileName,
        segment: StoredSegment,
        *,
        pinned: bool = False,
        on_written: Callable[[int], object] = lambda nbytes: None,
    ) -> int | NotStored:
        """Write a segment as a whole or not at all, after making room for it. `pinned`: keep it from being removed for
        space; so is a segment that replaces a pinned one. `on_written`: called with the bytes of each piece, and may
        block. Returns the bytes of the file, or why it was not written. Raises `Unwritable`."""
        size = encoded_size(name, segment, self._encryption)
        try:
            reserved = self._reserve(name, size)
            if isinstance(reserved, NotStored):
                return reserved
            with closing(reserved) as unfinished, ExitStack() as undo:
                undo.callback(self._release, size)
                write_segment(unfinished.file, name, segment, self._encryption, on_written)
                unfinished.sync()
                self._finish(unfinished, name, size, pinned=pinned)
                undo.pop_all()
            self._sync()
            if name.has_state:
                self._remove_replaced(replace(name, has_state=False))
            return size
        except OSError as error:
            self._known = None
            raise Unwritable(str(error)) from error

    @property
    def sizes(self) -> dict[FileName, int]:
        """Bytes of each file of this version, of all models, as of the last scan; without those that are left
        alone."""
        if not self._known:
            return {}
        for name, identity in self._unreadable.copy().items():
            if str(name) not in self._known.files or self._identity(name) != identity:
                self._unreadable.pop(name, None)
        names = (name for name in self._known.names if name not in self._unreadable)
        return {name: self._known.files[str(name)].nbytes for name in names}

    def leave_alone(self, name: FileName) -> None:
        """Leave a file that cannot be read out of `sizes`, until it is replaced or its permissions change. It still
        counts for the quota. Raises no OSError."""
        self._unreadable[name] = self._identity(name)

    def _identity(self, name: FileName) -> "_Identity | None":
        try:
            stat = (self.path / str(name)).stat()
        except OSError:
            return None
        return _Identity(stat.st_ino, stat.st_size, stat.st_mode, stat.st_uid)

    def _reserve(self, name: FileName, size: int) -> UnfinishedFile | NotStored:
        """Make room for a file, and create it with its size, so that other processes count it from now on. Returns why
        not if it may not be written. Raises OSError."""
        with self._locked():
            record = self._read_record()
            if size > self._max_bytes:
                return NotStored.QUOTA
            if not fits_budget(size, record.nbytes, self._daily_bytes):
                return NotStored.DAILY_LIMIT
            self._known = self._enforced(size)
            if self._known.nbytes + size > self._max_bytes:
                return NotStored.QUOTA
            temporary = name.temporary(f"{os.getpid()}-{time.monotonic_ns()}")
            with ExitStack() as undo:
                unfinished = undo.enter_context(closing(UnfinishedFile(self.path / temporary, size)))
                self._write_record(record.nbytes + size)
                undo.pop_all()
            self._known = self._known.with_unfinished(temporary, size)
            return unfinished

    def _finish(self, unfinished: UnfinishedFile, name: FileName, size: int, *, pinned: bool) -> None:
        """Let a file that is written appear, with its pin. Raises OSError."""
        without_state = replace(name, has_state=False)
        with self._locked():
            record = self._read_record()
            if pinned or (self.path / without_state.pin).exists():
                pinned = True
                (self.path / name.pin).touch(mode=0o600)  # first, so that the file is never without it
            unfinished.finish(self.path / str(name))
            if self._known and record == self._last_record:
                self._known = self._known.without({unfinished.path.name}).with_file(name, size, pinned=pinned)
            else:  # another process has changed the folder since
                self._known = None
            self._write_record(record.nbytes)

    def _remove_replaced(self, name: FileName) -> None:
        """Remove a file that another one replaces."""
        self.remove(name)
        self._known = self._known and self._known.without({str(name)})

    def _release(self, size: int) -> None:
        """Give the bytes of a file that was not written back to the budget of the day. Raises no OSError."""
        self._known = None
        with suppress(OSError), self._locked():
            self._write_record(max(0, self._read_record().nbytes - size))

    def _sync(self) -> None:
        """Make the names durable."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some file systems do not support it
                raise
        finally:
            os.close(folder)

    def remove(self, name: FileName) -> bool:
        """Remove a file, if it is there, with its pin. Returns False if that failed. Raises no OSError."""
        return self._unlink(str(name)) & self._unlink(name.pin)

    def _unlink(self, relative: str) -> bool:
        try:
            (self.path / relative).unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def touch(self, name: FileName) -> bool:
        """Mark a file as used now. Returns False if it is gone. Raises no OSError."""
        path = self.path / str(name)
        with suppress(OSError):
            os.utime(path)
        with suppress(OSError):  # of a failing disk
            return path.exists()
        return False

    def pin(self, name: FileName) -> bool:
        """Keep a file from being removed for space. Returns False if that failed. Raises no OSError."""
        try:
            (self.path / name.pin).touch(mode=0o600)
        except OSError:
            return False
        if self._known:
            self._known = self._known.with_pin(name)
        return True

    def _enforced(self, room: int) -> Scan:
        """Remove unfinished files of writers that have died, pins without a file, and files until `room` bytes fit.
        Requires the lock."""
        scan = self._known
        if scan is None or time.monotonic() - self._scanned_s > _SCAN_S or self._read_record() != self._last_record:
            scan = scan_folder(self.path)
            self._scanned_s = time.monotonic()
        victims = {each for each in scan.unfinished if is_abandoned(self.path / each)} | {*scan.lone_pins}
        others = [file for key, file in scan.files.items() if key not in victims]
        excess = sum(file.nbytes for file in others) - self._max_bytes
        fixed = sum(file.nbytes for file in others if not file.removable)
        needed = room if fixed + room <= self._max_bytes else 0  # for what does not fit anyway nothing is removed
        victims.update(filter(self._unpinned, files_to_remove(others, excess + needed)))
        for each in victims:
            with suppress(OSError):
                (self.path / each).unlink()
        return scan.without(victims) if victims else scan

    def _unpinned(self, relative: str) -> bool:
        return not (self.path / pin_of(relative)).exists()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)  # it may have been deleted
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _read_record(self) -> "_Record":
        """Return what all processes have written today, and which change of the folder was the last."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads((self.path / WRITTEN).read_text())
            if raw["day"] == _today():
                return _Record(int(raw["bytes"]), str(raw["writer"]))
        return _Record(0, "")

    def _write_record(self, nbytes: int) -> None:
        self._last_record = _Record(nbytes, f"{self._writer}-{next(self._changes)}")
        content = {"day": _today(), "bytes": nbytes, "writer": self._last_record.change}
        temporary = self.path / f"{WRITTEN}{TEMPORARY}"
        temporary.write_text(json.dumps(content))
        temporary.rename(self.path / WRITTEN)


@dataclass(frozen=True, slots=True)
class _Record:
    nbytes: int  # written today, or reserved for files that are being written
    change: str  # last one of the folder: which process has made it, and its number there


@dataclass(frozen=True, slots=True)
class _Identity:
    """What differs if a file is replaced, or its permissions change."""

    inode: int
    nbytes: int
    mode: int
    owner: int


def _today() -> int:
    return int(time.time() // _DAY_S)
