"""The folder: its quota, and files that are written as a whole or not at all.

Several processes share it. One that writes or removes for space holds a lock on the folder, so that together they keep
the quota; readers need no lock."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
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
    recorded_model,
)
from worker.prefix_store.records import ModelRecord
from worker.schedule.cache.disk import NotStored, StoredFile, files_to_remove, fits_budget

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
    temporary: tuple[str, ...]  # unfinished files, and pins without a file
    names: tuple[FileName, ...]  # files of this version, of all models
    stale: tuple[str, ...] = ()  # files of other versions
    models: tuple[str, ...] = ()  # digests that have a record

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files.values())

    def without(self, keys: Collection[str]) -> "Scan":
        """Return the scan without these files, which were removed."""
        files = {key: file for key, file in self.files.items() if key not in keys}
        return Scan(files, (), tuple(name for name in self.names if str(name) not in keys))

    def with_file(self, name: FileName, nbytes: int, *, pinned: bool) -> "Scan":
        """Return the scan with a file that was written now."""
        file = StoredFile(str(name), nbytes, time.time(), name.end, removable=not pinned)
        return Scan({**self.files, str(name): file}, (), (*self.names, name))

    def with_pin(self, name: FileName) -> "Scan":
        """Return the scan with a file that was pinned now."""
        key = str(name)
        if key not in self.files:
            return self
        return Scan({**self.files, key: replace(self.files[key], removable=False)}, self.temporary, self.names)


class Folder:
    """A folder of places. For one thread, except `path`."""

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
        self._last_record = _Record(0, "")
        self._known: Scan | None = None  # the last scan, with own changes
        self._scanned_s = 0.0

    def scan(self) -> Scan:
        """List the folder, and what is in folders in it. Opens no file."""
        files = dict[str, StoredFile[str]]()
        temporary, names = list[str](), list[FileName]()
        stale, models = list[str](), list[str]()
        pinned = set[str]()
        for relative, stat in _walk(self.path):
            name = parse_name(relative)
            if is_pin(relative):
                pinned.add(pinned_name(relative))
            if is_temporary(relative):
                temporary.append(relative)
            if name:
                names.append(name)
            if model := recorded_model(relative):
                models.append(model)
            known = name or model or is_pin(relative) or is_temporary(relative) or relative in (_LOCK, _WRITTEN)
            is_stale = is_ours(relative) and not known
            if is_stale:
                stale.append(relative)
            used_s = stat.st_mtime if name else 0.0  # stale files first
            files[relative] = StoredFile(
                relative, stat.st_size, used_s, name.end if name else 0, bool(name) or is_stale
            )
        for key in pinned & files.keys():
            files[key] = replace(files[key], removable=False)
        temporary += map(pin_of, pinned - files.keys())
        return Scan(files, tuple(temporary), tuple(names), tuple(stale), tuple(models))

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
        place: Place,
        *,
        pinned: bool = False,
        on_written: Callable[[int], object] = lambda nbytes: None,
    ) -> int | NotStored:
        """Write a place as a whole or not at all, after making room for it. `pinned`: keep it from being removed for
        space; so is a place that replaces a pinned one. `on_written`: called with the bytes of each piece, and may
        block. Returns the bytes of the file, or why it was not written. Raises `Unwritable`."""
        size = encoded_size(name, place, self._encryption)
        try:
            with self._locked():
                record = self._read_record()
                if size > self._max_bytes:
                    return NotStored.QUOTA
                if not fits_budget(size, record.nbytes, self._daily_bytes):
                    return NotStored.DAILY_LIMIT
                scan = self._enforced(size)
                if scan.nbytes + size > self._max_bytes:
                    return NotStored.QUOTA
                without_state = replace(name, has_state=False)
                pinned = pinned or (self.path / without_state.pin).exists()
                self._write(name, place, on_written, pinned=pinned)
                scan = scan.with_file(name, size, pinned=pinned)
                if name.has_state:
                    self.remove(without_state)
                    scan = scan.without([str(without_state)])
                self._known = scan
                self._write_record(record.nbytes + size)
                return size
        except OSError as error:
            self._known = None
            raise Unwritable(str(error)) from error

    @property
    def sizes(self) -> dict[FileName, int]:
        """Bytes of each file of this version, of all models, as of the last scan."""
        return {name: self._known.files[str(name)].nbytes for name in self._known.names} if self._known else {}

    def _write(self, name: FileName, place: Place, on_written: Callable[[int], object], *, pinned: bool) -> None:
        temporary = self.path / name.temporary
        try:
            with temporary.open("wb") as file:
                os.chmod(file.fileno(), 0o600)  # prompts are private
                write_place(file, name, place, self._encryption, on_written)
                file.flush()
                os.fsync(file.fileno())
            if pinned:  # before the file appears, so that it is never without its pin
                (self.path / name.pin).touch(mode=0o600)
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

    def touch(self, name: FileName) -> bool:
        """Mark a file as used now. Returns False if it is gone. Raises no OSError."""
        with suppress(OSError):
            os.utime(self.path / str(name))
        return (self.path / str(name)).exists()

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
        """Remove unfinished files, pins without a file, and files until `room` bytes fit. Requires the lock, so that no
        writer is alive."""
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
