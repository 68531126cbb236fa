"""The folder: its quota, and files that are written as a whole or not at all.

Several processes share it. One that removes for space, reserves the bytes of a new file, or lets a finished one appear
holds a lock on the folder for milliseconds, so that together they keep the quota; one that was stopped keeps it. To
write content and to read, no lock is needed."""

import errno
import fcntl
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from worker.outcomes import NotStored
from worker.prefix_store.encryption import Encryption
from worker.prefix_store.format import StoredSegment, encoded_size, write_segment
from worker.prefix_store.names import LOCK, WRITTEN, FileName, pin_of
from worker.prefix_store.policy import files_to_remove, fits_budget
from worker.prefix_store.records import HitRecord, MemoryRecord, ModelRecord, write_record
from worker.prefix_store.scan import Scan, copy_pin, scan_folder, write_pin

_WAIT_S = 10.0  # a scan of 10,000 files, the longest that a process does with the lock, takes about one second
_LAST_WAIT_S = 1.0  # while the worker ends


class _CountingFile(io.BufferedWriter):
    """Counts what is written, and bytes that are written again once more."""

    written_bytes = 0

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self.written_bytes += written
        return written


class _UnfinishedFile:
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

    def close(self) -> None:
        """Close the file, and remove it unless it was renamed. Raises no OSError."""
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


class _FolderLock:
    """The lock of a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._ending = threading.Event()

    def shorten_waits(self) -> None:
        """Wait for a second at most from now on, also if a wait has begun. May be called on any thread."""
        self._ending.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; creates the folder. Raises TimeoutError if another process does not release it, and other
        kinds of OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # it may have been deleted
        file = self._acquire()
        try:
            yield
        finally:
            os.close(file)

    def _acquire(self) -> int:
        """Return the open file that has the lock. Polls, since a wait in the system cannot be ended."""
        began_s = time.monotonic()
        while (file := self._try()) is None:
            waited_s = time.monotonic() - began_s
            if waited_s >= (_LAST_WAIT_S if self._ending.is_set() else _WAIT_S):
                raise TimeoutError(
                    f"another process has kept the lock of the folder for {waited_s:.0f} s; continue or end it"
                )
            time.sleep(0.005)
        return file

    def _try(self) -> int | None:
        """Return the open file that has the lock; None if another process has it. Opened anew each time: a lock
        on a deleted file protects nothing."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        is_held = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = os.path.samestat(os.fstat(file), self._path.stat())
        except (BlockingIOError, FileNotFoundError):
            return None
        finally:
            if not is_held:
                os.close(file)
        return file if is_held else None


class Unwritable(Exception):
    """A file could not be written: the disk is full, the folder is gone, or another process keeps its lock."""


class Folder:
    """A folder of segments. `path`, `remove`, `touch`, `leave_alone` and `lock` may be used on any thread,
    everything else on one."""

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        daily_bytes: int | None = None,
        encryption: Encryption | None = None,
        record: ModelRecord | None = None,
        usage: Sequence[HitRecord | MemoryRecord] = (),
    ) -> None:
        """`max_bytes`: of all files in the folder together, also those of others. `daily_bytes`: most bytes to write in
        a day; None: no limit. `encryption`: of the files that are written; None: they are plain. `record`: of
        the model in use, renewed by `enforce`, as `usage` is. Creates the folder; raises OSError."""
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self._max_bytes = max_bytes
        self._daily_bytes = daily_bytes
        self._encryption = encryption
        self._record = record
        self._usage = usage
        self._writer = f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
        self._changes = count()  # of the folder, by this process
        self.lock = _FolderLock(path)
        self._last_record = _Record(0, 0, "")
        self._known: Scan | None = None  # the last scan, with own changes
        self._scanned_s = 0.0
        self._undeletable = set[str]()  # files that could not be removed
        self._unreadable: dict[FileName, _Identity | None] = {}  # as they were when they could not be read

    def enforce(self) -> None:
        """Scan the folder, and remove unfinished files of writers that have died, and what exceeds the quota; then
        renew the records. Raises OSError, and `Unwritable` if the folder was scanned, but another process keeps its
        lock, or a record cannot be written."""
        try:
            with self.lock.held():
                self._known = self._enforced(self._scan(), 0)
                self._known = self._renew_records(self._known)
        except TimeoutError as error:
            self._known = self._scan()  # needs no lock, as little as reading does
            raise Unwritable(str(error)) from error

    def end_usage(self) -> None:
        """Write what the records of the use of prefixes lack, and remove those of this worker. Raises no OSError."""
        with suppress(OSError):
            if self.path.exists():
                with self.lock.held():
                    scan = self._known or self._scan()
                    for each in self._usage:
                        each.end(self.path, self._max_bytes - scan.nbytes)

    def write(
        self,
        name: FileName,
        segment: StoredSegment,
        *,
        pinned: bool = False,
        ends_pinned: bool = False,
        on_written: Callable[[int], object] = lambda nbytes: None,
    ) -> int | NotStored:
        """Write a segment as a whole or not at all, after making room for it. `pinned`: keep it from being removed for
        space; so is a segment that replaces a pinned one. `ends_pinned`: the pinned prefix ends with it. `on_written`:
        called with the bytes of each piece, and may block. Returns the bytes of the file, or why it was not written.
        Raises `Unwritable`."""
        size = encoded_size(name, segment, self._encryption)
        try:
            reserved = self._reserve(name, size)
            if isinstance(reserved, NotStored):
                return reserved
            unfinished, reserved_on = reserved
            with closing(unfinished), ExitStack() as undo:
                undo.callback(self._release, unfinished, reserved_on)
                write_segment(unfinished.file, name, segment, self._encryption, on_written)
                unfinished.sync()
                self._finish(unfinished, name, size, pinned=pinned, ends_pinned=ends_pinned)
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

    def _renew_records(self, scan: Scan) -> Scan:
        """Renew all records, and return the scan with their new sizes. Requires the lock."""
        try:
            if self._record:
                self._record.renew(self.path)
            for each in self._usage:
                if sizes := each.renew(self.path, scan, self._max_bytes - scan.nbytes):
                    scan = scan.with_sizes(sizes)
        except OSError as error:
            raise Unwritable(str(error)) from error
        return scan

    def _reserve(self, name: FileName, size: int) -> tuple[_UnfinishedFile, int] | NotStored:
        """Make room for a file, and create it with its size, so that other processes count it from now on. Returns the
        file and the day to whose budget its bytes count, or why it may not be written. Raises OSError."""
        with self.lock.held():
            record = self._read_record()
            if size > self._max_bytes:
                return NotStored.QUOTA
            if not fits_budget(size, record.nbytes, self._daily_bytes):
                return NotStored.DAILY_LIMIT
            # Files of others are counted again after this time; those of other workers at each write.
            is_old = time.monotonic() - self._scanned_s > 5.0
            if self._known is None or is_old or record != self._last_record:
                self._known = self._scan()
            self._known = self._enforced(self._known, size)
            if self._known.nbytes + size > self._max_bytes:
                return NotStored.QUOTA
            temporary = name.temporary(f"{os.getpid()}-{time.monotonic_ns()}")
            with ExitStack() as undo:
                unfinished = undo.enter_context(closing(_UnfinishedFile(self.path / temporary, size)))
                self._write_record(replace(record, nbytes=record.nbytes + size))
                undo.pop_all()
            self._known = self._known.with_unfinished(temporary, size)
            return unfinished, record.day

    def _finish(
        self, unfinished: _UnfinishedFile, name: FileName, size: int, *, pinned: bool, ends_pinned: bool
    ) -> None:
        """Let a file that is written appear, with its pin. Raises OSError."""
        with self.lock.held():
            record = self._read_record()
            # The pin comes first, so that the file is never without it.
            pinned |= copy_pin(self.path, replace(name, has_state=False), name)
            if pinned:
                write_pin(self.path, name, is_end=ends_pinned)
            unfinished.path.rename(self.path / str(name))
            if self._known and record == self._last_record:
                self._known = self._known.without({unfinished.path.name}).with_file(name, size, pinned=pinned)
            else:  # another process has changed the folder since
                self._known = None
            with suppress(OSError):  # the file has appeared; others find it when they scan the next time
                self._write_record(record)

    def _remove_replaced(self, name: FileName) -> None:
        """Remove a file that another one replaces."""
        if self.remove(name):
            self._known = self._known and self._known.without({str(name)})

    def _release(self, unfinished: _UnfinishedFile, day: int) -> None:
        """Give the bytes of a file that were not written back to the budget of the day that they were taken from.
        Raises no OSError."""
        self._known = None
        with suppress(OSError), self.lock.held():
            record = self._read_record()
            if record.day == day:
                self._write_record(replace(record, nbytes=max(0, record.nbytes - unfinished.missing_bytes)))

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

    def pin(self, name: FileName, *, is_end: bool = False) -> bool:
        """Keep a file from being removed for space. `is_end`: the pinned prefix ends with it. Returns False if that
        failed. Raises no OSError."""
        try:
            write_pin(self.path, name, is_end=is_end)
        except OSError:
            return False
        if self._known:
            self._known = self._known.with_pin(name)
        return True

    def _scan(self) -> Scan:
        scan = scan_folder(self.path)
        self._scanned_s = time.monotonic()
        self._undeletable.intersection_update(scan.files)
        return scan

    def _enforced(self, scan: Scan, room: int) -> Scan:
        """Remove unfinished files of writers that have died, pins without a file, and files until `room` bytes fit.
        Returns what is left. Requires the lock."""
        victims = {each for each in scan.unfinished if is_abandoned(self.path / each)} | {*scan.lone_pins}
        others = [file for key, file in scan.files.items() if key not in victims]
        others = [replace(file, removable=False) if file.key in self._undeletable else file for file in others]
        excess = sum(file.nbytes for file in others) - self._max_bytes
        fixed = sum(file.nbytes for file in others if not file.removable)
        needed = room if fixed + room <= self._max_bytes else 0  # for what does not fit anyway nothing is removed
        victims.update(filter(self._unpinned, files_to_remove(others, excess + needed)))
        removed = {each for each in victims if self._unlink(each)}
        self._undeletable |= victims - removed  # others are tried the next time
        return scan.without(removed) if removed else scan

    def _unpinned(self, relative: str) -> bool:
        return not (self.path / pin_of(relative)).exists()

    def _read_record(self) -> "_Record":
        """Return what all processes have written today, and which change of the folder was the last."""
        today = _today()
        with suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads((self.path / WRITTEN).read_text("utf-8"))
            if raw["day"] == today:
                return _Record(today, int(raw["bytes"]), str(raw["writer"]))
        return _Record(today, 0, "")

    def _write_record(self, record: "_Record") -> None:
        self._last_record = replace(record, change=f"{self._writer}-{next(self._changes)}")
        content = {"day": record.day, "bytes": record.nbytes, "writer": self._last_record.change}
        write_record(self.path / WRITTEN, json.dumps(content))


@dataclass(frozen=True, slots=True)
class _Record:
    day: int  # since 1970
    nbytes: int  # written on this day, or reserved for files that are being written
    change: str  # last one of the folder: which process has made it, and its number there


@dataclass(frozen=True, slots=True)
class _Identity:
    """What differs if a file is replaced, or its permissions change."""

    inode: int
    nbytes: int
    mode: int
    owner: int


def _today() -> int:
    return int(time.time() // 86_400)
