"""Files of clients in a folder of runs: what they upload, and what their runs answer.

A file is the folder `files/<tenant>/<id>` with `data` and `about.json`. It is built in `.<id>.part`, whose `data` its
process has locked, and renamed: so it is there whole or not at all, and `sweep` removes what a dead process left.
A file that comes in parts is the folder `<upload id>` beside them, in which each part is such a file.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sluice.batch.files import read_state
from sluice.contract.batch import Batch
from sluice.errors import SluiceError

Purpose = Literal["batch", "batch_output"]

_ID = re.compile(r"file-[0-9a-f]{24}")
_UPLOAD_ID = re.compile(r"upload_[0-9a-f]{24}")


class StoreFull(SluiceError):
    """More bytes than may be stored."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is complete. Times are Unix seconds."""

    id: str
    filename: str
    purpose: Purpose
    bytes: int
    sha256: str
    created_at: int
    expires_at: int | None = None
    run: str | None = None  # the id of the run that made it

    @property
    def has_expired(self) -> bool:
        """True if the file is to be removed."""
        return self.expires_at is not None and time.time() >= self.expires_at


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that comes in parts. Methods block, and raise OSError."""

    folder: Path
    filename: str
    bytes: int
    life_s: int  # of the file
    status: Literal["pending", "completed", "cancelled"] = "pending"
    file: str | None = None  # its id, from the moment in which its parts are being joined

    @property
    def id(self) -> str:
        """The id of the upload, which is the name of its folder."""
        return self.folder.name

    @property
    def created_at(self) -> int:
        """Unix seconds."""
        return _created_at(self.id)

    @property
    def expires_at(self) -> int:
        """Unix seconds; then the upload is removed, with its parts."""
        return self.created_at + 3_600  # as OpenAI's

    def parts(self) -> list[StoredFile]:
        """Return the parts that are there whole, in the order of their ids."""
        found = (_about(self.folder / name) for name in sorted(_names(self.folder)) if _ID.fullmatch(name))
        return [part for part in found if part is not None]

    def new_part(self) -> "NewFile":
        """Return a part to write."""
        return NewFile(self.folder, _new_id("file-"))

    def new_file(self) -> "NewFile":
        """Return the file that the parts become, to write. Its id is saved first."""
        file_id = _new_id("file-")
        replace(self, file=file_id).save()
        return NewFile(self.folder.parent, file_id)

    def join(self, parts: Sequence[StoredFile], new: "NewFile", md5: Any) -> Iterator[bool]:
        """Write the parts to the file and to the digest, some milliseconds' work for each value that is yielded."""
        for part in parts:
            with (self.folder / part.id / "data").open("rb") as data:
                while piece := data.read(1 << 22):
                    new.write(piece)
                    md5.update(piece)
                    yield True

    def end(self, status: Literal["completed", "cancelled"], file: str | None = None) -> "Upload":
        """Save the status, and the id of the file, and remove the parts."""
        ended = replace(self, status=status, file=file)
        ended.save()
        for name in _names(self.folder):
            if _ID.fullmatch(name):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        return ended

    def save(self) -> None:
        """Write what is known of the upload."""
        content = {name: value for name, value in asdict(self).items() if name != "folder"}
        with (new := self.folder / ".upload.json").open("w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.folder / "upload.json")

    def locked(self) -> AbstractContextManager[bool]:
        """Return the lock of the upload. That of its folder is for the parts."""
        return tried_lock(self.folder / "lock")


class FileStore:
    """The files of a folder of runs. Tenant None is the operator, who has all of them. All methods block, and raise
    OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._root = folder, folder / "files"

    @property
    def exists(self) -> bool:
        """True if a gateway uses the folder."""
        return self._root.is_dir()

    def make(self) -> None:
        """Let feeders put the answers of runs here, and sweep."""
        self._root.mkdir(exist_ok=True)
        self.sweep()

    def new(self, tenant: str | None, least_bytes: int = 0, max_held: int | None = None) -> "NewFile":
        """Return a file to write, of at least so many bytes. Raises `StoreFull`, as `NewFile.publish` does."""
        home = self._home(tenant)
        home.mkdir(parents=True, exist_ok=True)
        self.check_space(tenant, least_bytes, max_held)
        return NewFile(home, _new_id("file-"))

    def check_space(self, tenant: str | None, more_bytes: int, max_held: int | None) -> None:
        """Raise `StoreFull` if so many bytes do not fit beside all files and parts, complete or not."""
        if max_held is not None:
            home = self._home(tenant)
            folders = [home, *(home / name for name in _names(home) if _UPLOAD_ID.fullmatch(name))]
            held = sum(_length(folder / name / "data") for folder in folders for name in _names(folder))
            _refuse_full(max_held, more_bytes + held)

    def new_upload(self, tenant: str | None, filename: str, bytes: int, life_s: int, *, max_held: int | None) -> Upload:
        """Begin a file that comes in parts. Raises `StoreFull`."""
        self.check_space(tenant, bytes, max_held)
        upload = Upload(self._home(tenant) / _new_id("upload_"), filename, bytes, life_s)
        upload.folder.mkdir(parents=True)
        upload.save()
        return upload

    def find_upload(self, tenant: str | None, upload_id: str) -> Upload | None:
        """Return an upload; None if the tenant has none of this id, or no longer."""
        for home in self._homes(tenant) if _UPLOAD_ID.fullmatch(upload_id) else []:
            with suppress(FileNotFoundError):
                upload = Upload(home / upload_id, **json.loads((home / upload_id / "upload.json").read_bytes()))
                return upload if time.time() < upload.expires_at else None
        return None

    def find(self, tenant: str | None, file_id: str) -> StoredFile | None:
        """Return a file; None if the tenant has none of this id."""
        homes = self._homes(tenant) if _ID.fullmatch(file_id) else []
        found = next(filter(None, (_about(home / file_id) for home in homes)), None)
        return None if found is None or found.has_expired else found

    def data(self, tenant: str | None, file_id: str) -> Path:
        """Return the path of a file's data. `file_id`: of a file that `find` has returned."""
        paths = (home / file_id / "data" for home in self._homes(tenant))
        return next((path for path in paths if path.exists()), self._home(tenant) / file_id / "data")

    def ids(self, tenant: str | None, *, newest_first: bool) -> list[str]:
        """Return the ids of all files, in the order of their creation."""
        names = (name for home in self._homes(tenant) for name in _names(home))
        return sorted((name for name in names if _ID.fullmatch(name)), reverse=newest_first)

    def delete(self, tenant: str | None, file: StoredFile) -> None:
        """Remove a file, and the answers of a run in the run's own folder too."""
        for home in self._homes(tenant):
            if (home / file.id).exists():
                self._remove(home, file)

    def keep_results(self, batch: Batch, run_dir: Path) -> None:
        """Make files of the answers and the errors of a run that has ended, unless it was done before."""
        for file_id, source in zip(result_ids(batch), ("output.jsonl", "errors.jsonl"), strict=True):
            home = self._home(batch.sluice.tenant)
            if file_id is None or (home / file_id).exists() or not (run_dir / source).exists():
                continue
            home.mkdir(parents=True, exist_ok=True)
            new = NewFile(home, file_id, run_dir / source)
            try:
                name = f"{batch.id}_{source.replace('errors', 'error')}"
                new.publish(name, "batch_output", batch.sluice.output_expires_s, run=batch.id)
            finally:
                new.discard()

    def sweep(self) -> None:
        """Remove expired files, those of runs whose folders are gone, and what dead processes left."""
        for gone in (*self._folder.glob("done/.*.gone"), *self._folder.glob("failed/.*.gone")):
            shutil.rmtree(gone, ignore_errors=True)  # a run that its client has deleted
        for home in self._homes(None):
            for name in _names(home):
                if name.endswith((".part", ".gone")):
                    _remove_if_dead(home, home / name)
                elif _UPLOAD_ID.fullmatch(name):
                    _remove_if_expired(Upload(home / name, "", 0, 0))
                elif (file := _about(home / name)) is not None and (file.has_expired or self._is_orphan(file)):
                    self._remove(home, file)

    @contextmanager
    def locked(self, tenant: str | None) -> Iterator[None]:
        """Exclude other processes that use this lock of the tenant."""
        home = self._home(tenant)
        home.mkdir(parents=True, exist_ok=True)
        with locked_folder(home):
            yield

    def _is_orphan(self, file: StoredFile) -> bool:
        parts = ("running", "done", "failed", "running")  # in the order in which a run moves, and back to be run again
        return file.run is not None and not any((self._folder / part / file.run).exists() for part in parts)

    def _remove(self, home: Path, file: StoredFile) -> None:
        if file.run is not None:  # first, since no sweep would remove it once the file is gone
            name = "errors.jsonl" if file.filename.endswith("_error.jsonl") else "output.jsonl"
            for part in ("done", "failed"):
                run_dir = self._folder / part / file.run
                if _has_file(run_dir, file.id):
                    (run_dir / name).unlink(missing_ok=True)
        gone = home / f".{file.id}.gone"
        with suppress(FileNotFoundError):  # another process was faster
            (home / file.id).rename(gone)
            shutil.rmtree(gone)

    def _home(self, tenant: str | None) -> Path:
        if tenant is None:
            return self._root / "operator"
        return self._root / f"t-{hashlib.blake2b(tenant.encode(errors='replace'), digest_size=16).hexdigest()}"

    def _homes(self, tenant: str | None) -> list[Path]:
        if tenant is not None:
            return [self._home(tenant)]
        return [self._root / name for name in _names(self._root)]


class NewFile:
    """A file that is being written. Whoever makes one calls `discard` at the end in any case."""

    def __init__(self, home: Path, file_id: str, source: Path | None = None) -> None:
        """`source`: a file whose data it shares."""
        self._home, self.id = home, file_id
        self._part = home / f".{file_id}.part"
        self._sha256, self.length = hashlib.sha256(), 0
        with locked_folder(home):  # else a sweep might remove a folder without a locked file
            shutil.rmtree(self._part, ignore_errors=True)  # of a process that died
            self._part.mkdir()
            if source is not None:
                link_or_copy(source, self._part / "data")
            self._file = (self._part / "data").open("r+b" if source is not None else "x+b")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        while read := self._file.read(1 << 20):
            self._count(read)

    def write(self, data: bytes) -> None:
        """Append data."""
        self._file.write(data)
        self._count(data)

    def publish(
        self,
        filename: str,
        purpose: Purpose,
        expires_s: int | None,
        *,
        run: str | None = None,
        max_held: int | None = None,
    ) -> StoredFile:
        """Put the file among the others. `expires_s`: seconds until it is removed. Raises `StoreFull` if the files
        have more than `max_held` bytes with it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        created_at = _created_at(self.id)
        expires_at = None if expires_s is None else created_at + expires_s
        digest = self._sha256.hexdigest()
        file = StoredFile(self.id, filename, purpose, self.length, digest, created_at, expires_at, run)
        with (self._part / "about.json").open("x") as about:
            json.dump(asdict(file), about)
            about.flush()
            os.fsync(about.fileno())
        with locked_folder(self._home) as descriptor:
            complete = (name for name in _names(self._home) if not name.startswith("."))
            _refuse_full(max_held, self.length + sum(_length(self._home / name / "data") for name in complete))
            self._part.rename(self._home / self.id)
            os.fsync(descriptor)
        return file

    def discard(self) -> None:
        """Remove what was written, unless it was published."""
        with suppress(OSError):  # of what the full disk did not take
            self._file.close()
        shutil.rmtree(self._part, ignore_errors=True)

    def _count(self, data: bytes) -> None:
        self._sha256.update(data)
        self.length += len(data)


def result_ids(batch: Batch) -> tuple[str | None, str | None]:
    """Return the ids of a run's files of answers and of errors; None for one that it does not have, or not yet."""
    times = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    if not batch.ended or not any(times):
        return None, None
    ended_at = max(filter(None, times))
    output, errors = (
        _file_id(ended_at, hashlib.blake2b(f"{batch.id} {kind}".encode(), digest_size=16).hexdigest())
        for kind in ("output", "errors")
    )
    counts = batch.request_counts
    return output if counts.completed else None, errors if counts.failed else None


def _has_file(run_dir: Path, file_id: str) -> bool:
    """Return False for a file of answers that is older than those of a run that was run again."""
    try:
        state = read_state(run_dir / "run")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return state is not None and file_id in result_ids(state.batch)


def _refuse_full(max_held: int | None, held: int) -> None:
    if max_held is not None and held > max_held:
        problem = f"at most {max_held:,} bytes of files may be stored, and {held:,} would be"
        raise StoreFull(f"{problem}; delete some first")


def link_or_copy(source: Path, target: Path) -> None:
    """Give the file another name, or copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:
        shutil.copyfile(source, target)


def _file_id(created: float, unique: str, prefix: str = "file-") -> str:
    """Return an id. Ids sort by their times of creation."""
    return f"{prefix}{int(created * 1000):011x}{unique[:13]}"


def _new_id(prefix: str) -> str:
    return _file_id(time.time(), uuid.uuid4().hex, prefix)


def _created_at(stored_id: str) -> int:
    return int(stored_id[-24:][:11], 16) // 1000


def _about(folder: Path) -> StoredFile | None:
    try:
        return StoredFile(**json.loads((folder / "about.json").read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):  # such as macOS's .DS_Store
        return []


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _remove_if_expired(upload: Upload) -> None:
    if time.time() >= upload.expires_at:
        with suppress(FileNotFoundError), upload.locked() as is_mine:  # another process was faster
            if is_mine:  # else a request that came in time joins its parts
                shutil.rmtree(upload.folder, ignore_errors=True)


def _remove_if_dead(home: Path, folder: Path) -> None:
    with locked_folder(home):
        try:
            with (folder / "data").open("rb") as data:
                fcntl.flock(data, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except BlockingIOError:
            return  # its process writes it
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked_folder(folder: Path) -> Iterator[int]:
    """Exclude other processes that lock the folder. Yields its descriptor."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def tried_lock(path: Path) -> Iterator[bool]:
    """Yield True if this call has got the lock, which is a file. The kernel releases it if the process dies."""
    lock = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_mine = False
    else:
        is_mine = True
    try:
        yield is_mine
    finally:
        os.close(lock)
