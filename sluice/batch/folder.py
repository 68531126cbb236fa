"""A folder of runs: files arrive in `inbox`, run in `running`, and move to `done` or `failed`."""

import asyncio
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.batch.files import RunState, StateFile, read_state
from sluice.batch.registry import BatchRegistry, RedisOf
from sluice.batch.run import Run, endless_retries, new_batch, publish
from sluice.batch.source import RunOptions, RunPaths
from sluice.batch.store import FileStore, link_or_copy
from sluice.contract.batch import Batch, BatchState, Problem, Problems, is_run_id, new_run_id
from sluice.errors import BatchRefused, BatchTaken
from sluice.transport import Retries

logger = logging.getLogger("sluice.batch")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a folder of runs."""

    root: Path

    @property
    def inbox(self) -> Path:
        """Files that wait to be started."""
        return self.root / "inbox"

    @property
    def running(self) -> Path:
        """Runs that have not ended."""
        return self.root / "running"

    @property
    def done(self) -> Path:
        """Completed runs."""
        return self.root / "done"

    @property
    def failed(self) -> Path:
        """Runs that ended otherwise."""
        return self.root / "failed"

    @property
    def parts(self) -> tuple[Path, Path, Path]:
        """The folders of runs that were taken."""
        return self.running, self.done, self.failed

    def make(self) -> None:
        """Create the subfolders. Raises OSError."""
        for part in (self.inbox, *self.parts):
            part.mkdir(parents=True, exist_ok=True)

    def has(self, run_id: str) -> bool:
        """True if a run of this id exists."""
        return any(run_paths(part / run_id).input.exists() for part in self.parts)


def run_paths(run_dir: Path) -> RunPaths:
    """Return the files of a run in its own folder."""
    return RunPaths(run_dir / "input.jsonl", run_dir / "output.jsonl", run_dir / "errors.jsonl", run_dir / "run")


async def submit_file(redis: Redis, folder: RunFolder, file: Path, options: RunOptions) -> Batch:
    """Copy a file into the inbox, where it appears only when complete, and return the new run's status. Raises OSError,
    also if the folder does not exist, since its name may be misspelt, or `ServerUnreachable` if the status cannot be
    stored.

    The run's first state, which holds the options, is beside the file before the file appears: without its file it is
    nothing, and a feeder moves it first."""
    if not folder.root.is_dir():
        missing = "there is no such folder; give that of the workers, or make it first"
        raise NotADirectoryError(errno.ENOTDIR, missing, str(folder.root))
    folder.make()
    state = RunState(new_batch(run_paths(folder.running / options.id), options), "", options.models or {})
    with _Handover(folder, state) as handover:
        await asyncio.to_thread(handover.prepare, file, _copy)
        await Retries(redis, None).run(lambda: BatchRegistry(redis).announce(state.batch))
        handover.complete()
    return state.batch


def place_run(folder: RunFolder, state: RunState, file: Path) -> None:
    """Put a run into the inbox whose status the caller has announced, without a copy of its file if possible. Blocks,
    and raises OSError."""
    folder.make()
    with _Handover(folder, state) as handover:
        handover.prepare(file, link_or_copy)
        handover.complete()


class _Handover:
    """The files of a run on their way into the inbox. They are removed at the end unless `complete` was called."""

    def __init__(self, folder: RunFolder, state: RunState) -> None:
        self._partial = folder.inbox / f".{state.batch.id}.part"
        self._waiting = folder.inbox / f"{state.batch.id}.jsonl"
        self._state, self._state_path = state, self._waiting.with_suffix(".run")
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        for path in (self._partial, self._state_path):
            self._undo.callback(path.unlink, missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def prepare(self, file: Path, put: Callable[[Path, Path], None]) -> None:
        put(file, self._partial)
        with StateFile(self._state_path) as saved:
            saved.save(self._state)

    def complete(self) -> None:
        self._partial.rename(self._waiting)
        self._undo.pop_all()


def find_run(folder: RunFolder, run_id: str) -> RunState | None:
    """Return the saved state of a run; None if the folder has no such run. Blocks, and raises OSError."""
    if not is_run_id(run_id):
        return None
    # In the order in which a run moves, so that it is not missed: a run that waits has moved on or is there.
    paths = [folder.inbox / f"{run_id}.run", *(run_paths(each / run_id).state for each in folder.parts)]
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):
            if (path is not paths[0] or path.with_suffix(".jsonl").exists()) and (state := read_state(path)):
                return _not_ended(state) if state.batch.ended and path is paths[1] else state
    return None


def remove_run(folder: RunFolder, run_id: str) -> None:
    """Remove a run that has ended, with its files. Blocks, and raises OSError."""
    for part in (folder.done, folder.failed):
        gone = part / f".{run_id}.gone"
        with suppress(FileNotFoundError):
            (part / run_id).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _not_ended(state: RunState) -> RunState:
    """Return the state of a run without its end: until the run is moved its files may be missing."""
    ended_at: dict[str, Any] = {f"{state.batch.status}_at": None}
    before: BatchState = "cancelling" if state.batch.status == "cancelled" else "finalizing"
    return replace(state, batch=replace(state.batch, status=before, **ended_at))


def run_ids(folder: RunFolder) -> set[str]:
    """Return the ids of all runs of the folder, of some that have no state too. Blocks, and raises OSError."""
    waiting = (path.stem for path in folder.inbox.glob("*.run"))
    return {*waiting, *(path.name for each in folder.parts for path in each.glob("*") if is_run_id(path.name))}


def _copy(file: Path, partial: Path) -> None:
    with file.open("rb") as source, partial.open("xb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
        os.fsync(copy.fileno())


async def feed_runs(
    redis: Redis,
    folder: RunFolder,
    *,
    take: bool,
    models: Mapping[str, str],
    at_once: int = 8,
    redis_of: RedisOf | None = None,
) -> None:
    """Make one pass: with `take`, start the files of the inbox; then run each run in `running` that no other process
    feeds, the oldest first and several `at_once`: one for a model without a worker does not delay the others. Return
    when they have ended.

    All files are moved out of the inbox before the first run, so that another feeder can resume them if this process
    dies. `models` is the mapping for new runs; a resumed run keeps its own. `redis_of`: as for `run_batch`. A run that
    an error of the server or of a file interrupts stays in `running` for the next pass. Raises OSError if the folder
    cannot be read or written.
    """
    folder.make()
    for file in await _complete_files(folder.inbox) if take else []:
        _take(folder, file)
    if take:
        _remove_abandoned(folder.inbox)
        await asyncio.to_thread(FileStore(folder.root).sweep)
    slots = asyncio.Semaphore(at_once)

    async def feed_run(run_dir: Path) -> None:
        async with slots:
            await _resume(redis, redis_of or (lambda model: redis), folder, run_dir, models)

    async with asyncio.TaskGroup() as group:
        for file in _oldest_first(folder.running.glob("*/input.jsonl")):
            group.create_task(feed_run(file.parent))


async def _resume(redis: Redis, redis_of: RedisOf, folder: RunFolder, run_dir: Path, models: Mapping[str, str]) -> None:
    if not run_paths(run_dir).input.exists():
        return  # another feeder has moved it, or is moving it here
    try:
        with StateFile(run_paths(run_dir).state) as state:
            await _feed(redis, redis_of, folder, run_dir, state, models)
    except BatchTaken:
        pass
    except BatchRefused as error:  # a later pass would fail in the same way
        await _archive(redis, _refused(run_dir, error), run_dir, folder.failed)
    except (RedisError, OSError) as error:
        logger.error("%s waits for the next pass: %s", run_dir.name, error)


async def _feed(
    redis: Redis,
    redis_of: RedisOf,
    folder: RunFolder,
    run_dir: Path,
    state: StateFile,
    models: Mapping[str, str],
) -> None:
    saved = state.load()
    batch = saved.batch if saved else None
    if batch is None or not batch.ended:
        is_new = saved is None or not saved.sha256  # no line was queued: its input had not been read to its end
        logger.info("%s is %s", run_dir.name, "taken" if is_new else "resumed")
        options = RunOptions(models if is_new else None, id=run_dir.name, models_from_setting=True)
        run = Run(redis, redis_of, run_paths(run_dir), options, state)
        try:
            batch = await run.run_to_end()
        except BatchRefused as error:
            batch = run.fail([_problem(error)])
    await _archive(redis, batch, run_dir, (folder.done if batch.status == "completed" else folder.failed))


def _refused(run_dir: Path, error: BatchRefused) -> Batch:
    """Return a failed status for a run folder with files that no run wrote."""
    batch = replace(new_batch(run_paths(run_dir), RunOptions(id=run_dir.name)), errors=Problems((_problem(error),)))
    return batch.enter("failed", time.time())


def _problem(error: BatchRefused) -> Problem:
    return Problem("refused", f"{error}.")


async def _archive(redis: Redis, batch: Batch, run_dir: Path, parent: Path) -> None:
    """Move an ended run into `parent` and report its end.

    The status is stored before the move, so that a crash cannot hide it, and published after it, so that its readers
    find the files.
    """
    batch = moved(batch, parent / run_dir.name)
    registry = BatchRegistry(redis)
    retries = endless_retries(redis)
    await publish(retries, registry.put, batch)
    store = FileStore(run_dir.parent.parent)
    if store.exists:
        await asyncio.to_thread(store.keep_results, batch, run_dir)
    run_dir.rename(parent / run_dir.name)
    await publish(retries, registry.announce, batch)
    counts = batch.request_counts
    logger.info("%s %s: %d of %d lines answered", batch.id, batch.status, counts.completed, counts.total)


def moved(batch: Batch, new: Path) -> Batch:
    """Return the status of a run whose folder is moved to `new`."""

    def there(path: str) -> str:
        return str(new / Path(path).name)

    return replace(
        batch,
        input_file_id=there(batch.input_file_id),
        output_file_id=batch.output_file_id and there(batch.output_file_id),
        error_file_id=batch.error_file_id and there(batch.error_file_id),
    )


def _take(folder: RunFolder, file: Path) -> None:
    keeps_id = is_run_id(file.stem) and not folder.has(file.stem)
    run_dir = folder.running / (file.stem if keeps_id else new_run_id(file.stem))
    run_dir.mkdir(exist_ok=True)
    try:
        if keeps_id:
            with suppress(FileNotFoundError):  # put here by hand, or moved by another feeder
                file.with_suffix(".run").rename(run_paths(run_dir).state)
        file.rename(run_paths(run_dir).input)
    except FileNotFoundError:
        _remove_if_empty(run_dir)  # another feeder was faster


def _remove_abandoned(inbox: Path) -> None:
    """Remove the files of submissions that died a day ago."""
    for file in (*inbox.glob("batch_*.run"), *inbox.glob(".batch_*.part")):
        waits = file.suffix == ".run" and file.with_suffix(".jsonl").exists()
        if is_run_id(file.stem.lstrip(".")) and not waits and time.time() - _stamp(file)[0] > 86_400:
            file.unlink(missing_ok=True)


def _remove_if_empty(run_dir: Path) -> None:
    try:
        run_dir.rmdir()
    except OSError:
        pass  # the other feeder made it, and has moved the file into it


async def _complete_files(inbox: Path) -> list[Path]:
    """Return the files of the inbox that are complete, oldest first. May wait two seconds to see if a file changes.

    Files from `submit` are always complete. Links stay in the inbox: a relative one would break when it is moved.
    """
    found = [file for file in inbox.glob("*.jsonl") if not file.name.startswith(".")]
    irregular = {file for file in found if file.is_symlink() or (file.exists() and not file.is_file())}
    for other in irregular:
        logger.warning("%s stays in the inbox: it is a link or not a regular file", other.name)
    files = [file for file in found if file not in irregular]
    before = {file: _stamp(file) for file in files}
    settled_s = 2.0  # a file that has not changed for this long is complete
    if any(not is_run_id(file.stem) and time.time() - _stamp(file)[0] < settled_s for file in files):
        await asyncio.sleep(settled_s)
    return _oldest_first(file for file in files if file.is_file() and _stamp(file) == before[file])


def _oldest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=_stamp)


def _stamp(path: Path) -> tuple[float, int]:
    """Return when the file was written, in Unix seconds, and its size; zeros if another feeder has just moved it."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return 0.0, 0
    return stat.st_mtime, stat.st_size
