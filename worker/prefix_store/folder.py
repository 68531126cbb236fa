"""The folder: its quota, and files that are written as a whole or not at all.

Several processes share it. One that writes or removes for space holds a lock on the folder, so that together they keep
the quota; readers need no lock."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from worker.prefix_store.encryption import Encryption
from worker.prefix_store.format import Place, encoded_size, write_place
from worker.prefix_store.names import (
    TEMPORARY,
    FileName,
    is_ours,
    is_pin,
    is_temporary,
    parse_name,
    pin_of,
    pinned_name,
)
from worker.schedule.cache.disk import StoredFile, files_to_remove, fits_budget

_LOCK = "sluice-prefix-lock"
_WRITTEN = "sluice-prefix-written.json"  # bytes written today, by all processes
_DAY_S = 86_400
_SCAN_S = 5.0  # files of others are counted again after this time; those of other workers at each write


class Unwritable(Exception):
    """A file could not be written: the disk is full, or the folder is gone."""


@dataclass(frozen=True, slots=True)
class Scan:
    """Content of the folder."""

    files: dict[str, StoredFile[str]]  # by path relative to the folder
    temporary: tuple[str, ...]  # unfinished files
    names: tuple[FileName, ...]  # files of this version, of all models

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files.values())

    def without(self, keys: Collection[str]) -> "Scan":
        """Return the scan without these files, which were removed."""
        files = {key: file for key, file in self.files.items() if key not in keys}
        return Scan(files, (), tuple(name for name in self.names if str(name) not in keys))

    def with_file(self, name: FileName, nbytes: int) -> "Scan":
        """Return the scan with a file that was written now."""
        file = StoredFile(str(name), nbytes, time.time(), name.end)
        return Scan({**self.files, str(name): file}, (), (*self.names, name))


class Folder:
    """A folder of places. For one thread, except `path`."""

    def __init__(
        self, path: Path, max_bytes: int, daily_bytes: int | None = None, encryption: Encryption | None = None
    ) -> None:
        """`max_bytes`: of all files in the folder together, also those of others. `daily_bytes`: most bytes to write in
        a day; None: no limit. `encryption`: of the files that are written; None: they are plain. Creates
        the folder; raises OSError."""
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self._max_bytes = max_bytes
        self._daily_bytes = daily_bytes
        self._encryption = encryption
        self._writer = f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
        self._last_record = _Record(0, "")
        self._known: Scan | None = None  # the last scan, with own changes
        self._scanned_s = 0.0

    def scan(self) -> Scan:
        """List the folder, and what is in folders in it. Opens no file."""
        files = dict[str, StoredFile[str]]()
        temporary, names = list[str](), list[FileName]()
        pinned = set[str]()
        for relative, stat in _walk(self.path):
            name = parse_name(relative)
            if is_pin(relative):
                pinned.add(pinned_name(relative))
            if is_temporary(relative):
                temporary.append(relative)
            if name:
                names.append(name)
            stale = is_ours(relative) and not is_pin(relative) and relative not in (_LOCK, _WRITTEN)
            used_s = stat.st_mtime if name else 0.0  # stale files first
            files[relative] = StoredFile(relative, stat.st_size, used_s, name.end if name else 0, stale)
        for key in pinned & files.keys():
            files[key] = StoredFile(key, files[key].nbytes, files[key].used_s, files[key].end, removable=False)
        return Scan(files, tuple(temporary), tuple(names))

    def enforce(self) -> None:
        """Scan the folder, and remove unfinished files of writers that have died, and what exceeds the quota. Raises
        OSError."""
        with self._locked():
            self._known = None
            self._known = self._enforced(0)

    def write(self, name: FileName, place: Place) -> int:
        """Write a place as a whole or not at all, after making room for it. Returns the bytes of the file; 0 if no room
        can be made, or if today's budget is spent. Raises `Unwritable`."""
        size = encoded_size(name, place, self._encryption)
        try:
            with self._locked():
                record = self._read_record()
                if size > self._max_bytes or not fits_budget(size, record.nbytes, self._daily_bytes):
                    return 0
                scan = self._enforced(size)
                if scan.nbytes + size > self._max_bytes:
                    return 0
                self._write(name, place)
                self._known = scan.with_file(name, size)
                self._write_record(record.nbytes + size)
                if name.has_state:
                    self.remove(replace(name, has_state=False))
                return size
        except OSError as error:
            self._known = None
            raise Unwritable(str(error)) from error

    @property
    def sizes(self) -> dict[FileName, int]:
        """Bytes of each file of this version, of all models, as of the last scan."""
        return {name: self._known.files[str(name)].nbytes for name in self._known.names} if self._known else {}

    def _write(self, name: FileName, place: Place) -> None:
        temporary = self.path / name.temporary
        try:
            with temporary.open("wb") as file:
                os.chmod(file.fileno(), 0o600)  # prompts are private
                write_place(file, name, place, self._encryption)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self.path / str(name))
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._sync()

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

    def remove(self, name: FileName) -> None:
        """Remove a file, if it is there, with its pin. Raises no OSError."""
        for each in (str(name), name.pin):
            with suppress(OSError):
                (self.path / each).unlink()

    def touch(self, name: FileName) -> None:
        """Mark a file as used now. Raises no OSError."""
        with suppress(OSError):
            os.utime(self.path / str(name))

    def pin(self, name: FileName) -> None:
        """Keep a file from being removed for space. Raises no OSError."""
        with suppress(OSError):
            (self.path / name.pin).touch(mode=0o600)

    def _enforced(self, room: int) -> Scan:
        """Remove unfinished files, and files until `room` bytes fit. Requires the lock, so that no writer is alive."""
        scan = self._known
        if scan is None or time.monotonic() - self._scanned_s > _SCAN_S or self._read_record() != self._last_record:
            scan = self.scan()
            self._scanned_s = time.monotonic()
        victims = {*scan.temporary}
        others = [file for key, file in scan.files.items() if key not in victims]
        left = sum(file.nbytes for file in others)
        victims.update(filter(self._unpinned, files_to_remove(others, left + room - self._max_bytes)))
        for each in victims:
            with suppress(OSError):
                (self.path / each).unlink()
        return scan.without(victims) if victims else scan

    def _unpinned(self, relative: str) -> bool:
        return not (self.path / pin_of(relative)).exists()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)  # it may have been deleted
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _read_record(self) -> "_Record":
        """Return what all processes have written today, and which one wrote last."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads((self.path / _WRITTEN).read_text())
            if raw["day"] == _today():
                return _Record(int(raw["bytes"]), str(raw["writer"]))
        return _Record(0, "")

    def _write_record(self, nbytes: int) -> None:
        self._last_record = _Record(nbytes, f"{self._writer}-{nbytes}")
        content = {"day": _today(), "bytes": nbytes, "writer": self._last_record.writer}
        temporary = self.path / f"{_WRITTEN}{TEMPORARY}"
        temporary.write_text(json.dumps(content))
        temporary.rename(self.path / _WRITTEN)


@dataclass(frozen=True, slots=True)
class _Record:
    nbytes: int  # written today
    writer: str  # of the last write


def _today() -> int:
    return int(time.time() // _DAY_S)


def _walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all files, by path relative to the folder. Files that disappear meanwhile are left out, and links are not
    followed."""
    folders = [""]
    while folders:
        prefix = folders.pop()
        try:
            entries = [*os.scandir(folder / prefix)]
        except OSError:
            continue
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{relative}/")
                elif entry.is_file(follow_symlinks=False):
                    yield relative, entry.stat(follow_symlinks=False)
