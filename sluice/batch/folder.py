"""A folder of runs: files arrive in `inbox`, run in `running`, and move to `done` or `failed`."""

import asyncio
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.batch.files import RunState, StateFile, read_state
from sluice.batch.pace import OpenHours
from sluice.batch.registry import BatchRegistry, JobStores, RedisOf
from sluice.batch.run import Held, Run, endless_retries, new_batch, publish
from sluice.batch.source import WINDOW, RunOptions, RunPaths
from sluice.batch.store import FileStore, link_or_copy
from sluice.contract import keys
from sluice.contract.batch import NO_DETAILS, Batch, BatchDetails, BatchState, Problem, Problems, is_run_id, new_run_id
from sluice.errors import BatchRefused, BatchTaken
from sluice.presence import Workers
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
    """Copy a file into the inbox, where it appears only when complete, and return the run's status. Raises OSError,
    also if the folder does not exist, since its name may be misspelt, `ServerUnreachable` if the status cannot be
    stored, or `BatchTaken` if another process is submitting this run. One that is there already stays as it is.

    The run's first state, which holds the options, is beside the file before the file appears: without its file it is
    nothing, and a feeder moves it first."""
    if not is_run_id(options.id):
        raise ValueError(f"id: {options.id!r} is not the id of a run")
    if not folder.root.is_dir():
        missing = "there is no such folder; give that of the workers, or make it first"
        raise NotADirectoryError(errno.ENOTDIR, missing, str(folder.root))
    folder.make()
    state = RunState(new_batch(run_paths(folder.running / options.id), options), "", options.models or {})
    if not _is_there(folder, options.id):
        with _Handover(folder, state) as handover:
            if not _is_there(folder, options.id):  # another was not faster
                await asyncio.to_thread(handover.prepare, file, _copy)
                await Retries(redis, None).run(lambda: BatchRegistry(redis).announce(state.batch))
                handover.complete()
                return state.batch
    known = await asyncio.to_thread(find_run, folder, options.id)
    return known.batch if known else state.batch


def place_run(folder: RunFolder, state: RunState, file: Path) -> None:
    """Put a run into the inbox whose status the caller has announced, without a copy of its file if possible. Blocks,
    and raises OSError."""
    folder.make()
    with _Handover(folder, state) as handover:
        handover.prepare(file, link_or_copy)
        handover.complete()


def _is_there(folder: RunFolder, run_id: str) -> bool:
    return (folder.inbox / f"{run_id}.jsonl").exists() or folder.has(run_id)


class _Handover:
    """The files of a run on their way into the inbox. They are removed at the end unless `complete` was called. The
    lock of its state excludes others that hand the same run over."""

    def __init__(self, folder: RunFolder, state: RunState) -> None:
        """Raises OSError, or `BatchTaken` if another process hands this run over."""
        self._partial = folder.inbox / f".{state.batch.id}.part"
        self._waiting = folder.inbox / f"{state.batch.id}.jsonl"
        self._state, self._state_path = state, self._waiting.with_suffix(".run")
        try:
            self._saved = StateFile(self._state_path)
        except BatchTaken:
            problem = "another command is submitting it at this moment, so this one did nothing"
            raise BatchTaken(f"{state.batch.id}: {problem}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._waiting.exists():
            self._partial.unlink(missing_ok=True)
            self._state_path.unlink(missing_ok=True)
        self._saved.close()

    def prepare(self, file: Path, put: Callable[[Path, Path], None]) -> None:
        self._partial.unlink(missing_ok=True)  # of a process that died while it handed the same run over
        put(file, self._partial)
        self._saved.save(self._state)

    def complete(self) -> None:
        self._partial.rename(self._waiting)


def find_run(folder: RunFolder, run_id: str) -> RunState | None:
    """Return the saved state of a run; None if the folder has no such run. Blocks, and raises OSError."""
    if not is_run_id(run_id):
        return None
    # In the order in which a run moves, and back to be run again, so that it is not missed: a run has moved on or is
    # there.
    homes = [*folder.parts, folder.running]
    paths = [folder.inbox / f"{run_id}.run", *(run_paths(each / run_id).state for each in homes)]
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):
            if (path is not paths[0] or path.with_suffix(".jsonl").exists()) and (state := read_state(path)):
                return _not_ended(state) if state.batch.ended and path == paths[1] else state
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
    if file.exists() and not file.is_file():  # opening a pipe would wait for a writer
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
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
    hours: OpenHours | None = None,
    takes: asyncio.Event | None = None,
    clock: Callable[[], float] = time.time,
    look_s: float = 5.0,
) -> None:
    """Make one pass: with `take`, start the files of the inbox; then run each run in `running` that no other process
    feeds, by priority, then the oldest first, and several `at_once`: those for models without a worker give way to
    others. Return when they have ended. `takes` starts another pass with the files of the inbox when it is set. A
    run whose cancellation is requested is ended in any case, and does not wait for its turn.

    All files are moved out of the inbox before the first run, so that another feeder can resume them if this process
    dies. `models` is the mapping for new runs; a resumed run keeps its own. `redis_of`: as for `run_batch`; `hours`: of
    the workers' offline jobs, for the estimated ends; `clock`: Unix seconds, for `not_before`; `look_s`: between looks
    for requests to cancel runs that wait. A run that an error of the server or of a file interrupts stays in `running`
    for the next pass. Raises OSError if the folder cannot be read or written.
    """
    folder.make()
    redis_of, takes = redis_of or (lambda model: redis), takes or asyncio.Event()
    options = RunOptions(models, models_from_setting=True, hours=hours)
    precedence = _Precedence(redis, folder, redis_of)
    feeding, tried = dict[Path, asyncio.Task[None]](), set[Path]()
    places = dict[Path, int]()
    async with asyncio.TaskGroup() as group:
        while True:
            if take or takes.is_set():
                takes.clear()
                await _take_all(redis, folder, clock())
                take, tried = False, set(feeding)
            await _take_cancelled(redis, folder)
            waiting = _by_priority(folder, tried, places)
            first = waiting[: max(at_once - len(feeding), 0)]
            cancelled = await _cancelled(redis, [run_dir.name for run_dir in waiting[len(first) :]])
            for run_dir in [*first, *(folder.running / run_id for run_id in cancelled[:at_once])]:
                tried.add(run_dir)
                feeding[run_dir] = group.create_task(
                    _resume(redis, redis_of, folder, run_dir, options, precedence.held)
                )
            if giving_way := await precedence.giving_way(feeding, [each for each in waiting if each not in tried]):
                await _stop([feeding.pop(run_dir) for run_dir in giving_way])
                tried.difference_update(giving_way)
                places |= dict.fromkeys(giving_way, 1_000)  # behind all others
                continue
            if not feeding:
                return
            taking = group.create_task(_wait(takes))
            await asyncio.wait([taking, *feeding.values()], timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
            taking.cancel()
            feeding = {run_dir: task for run_dir, task in feeding.items() if not task.done()}


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _stop(feeding: Sequence[asyncio.Task[None]]) -> None:
    """Interrupt runs, and wait until others can resume them."""
    for task in feeding:
        task.cancel()
    await asyncio.wait(feeding)


def _by_priority(folder: RunFolder, tried: Collection[Path], known: dict[Path, int]) -> list[Path]:
    """Return the folders of the runs in `running` that were not `tried`, in the order in which they are started.
    `known`: their places by priority, the first the lowest, which are read once."""
    found = [file.parent for file in _oldest_first(folder.running.glob("*/input.jsonl")) if file.parent not in tried]
    known |= {run_dir: -_details(run_paths(run_dir).state).priority for run_dir in found if run_dir not in known}
    return sorted(found, key=lambda run_dir: known[run_dir])


def _details(state: Path) -> BatchDetails:
    with suppress(OSError):
        if saved := read_state(state):
            return saved.batch.sluice
    return NO_DETAILS


class _Precedence:
    """Runs of a folder whose lines are queued before those of others, whichever process feeds them; and those that give
    their places to others."""

    def __init__(self, redis: Redis, folder: RunFolder, redis_of: RedisOf) -> None:
        self._registry, self._folder = BatchRegistry(redis), folder
        self._redis_of = redis_of
        self._runs, self._due = list[Batch](), 0.0

    async def held(self, batch: Batch) -> Collection[str]:
        """Return the models whose lines have to wait: a run of the same tenant with a higher priority has more of them
        than its window takes."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + 2.0
            with suppress(RedisError, OSError):
                self._runs = await self._read()
        own = batch.sluice
        first = (run.sluice for run in self._runs if run.sluice.priority > own.priority)
        fed = (each for each in first if each.tenant == own.tenant and each.paused_at is None)
        return {model for each in fed for model, lines in each.left.items() if lines > WINDOW}

    async def giving_way(self, feeding: Collection[Path], waiting: Sequence[Path]) -> list[Path]:
        """Return those of the runs that are fed which have lines left only for models that nobody serves: at most as
        many as there are others that wait."""
        if not waiting:
            return []
        stalled = set[str]()
        with suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(2.0):
                left, served = {run.id: run.sluice.left for run in await self._read()}, set[str]()
                for redis in {self._redis_of(model) for models in left.values() for model in models}:
                    served |= await Workers(redis, endless_retries(redis), waits_out_outages=True).models()
                stalled = {run_id for run_id, models in left.items() if models and not served & models.keys()}
        others = sum(run_dir.name not in stalled for run_dir in waiting)
        most = min(others, max(64 - len(stalled), 0))  # since each keeps its queued lines on the server
        return [run_dir for run_dir in feeding if run_dir.name in stalled][:most]

    async def _read(self) -> list[Batch]:
        ids = [file.parent.name for file in self._folder.running.glob("*/input.jsonl")]
        if len(ids) < 2:
            return []
        runs = await self._registry.read_all([keys.batch(id).encode() for id in ids])
        return [run for run in runs if run.status == "in_progress"]


async def _take_all(redis: Redis, folder: RunFolder, now: float) -> None:
    for file in await _complete_files(folder.inbox):
        if await _is_due(redis, file, now):
            _take(folder, file)
    _remove_abandoned(folder.inbox)
    await asyncio.to_thread(FileStore(folder.root).sweep)


async def _is_due(redis: Redis, file: Path, now: float) -> bool:
    """Return False for a file that waits for its `not_before`."""
    not_before = _details(file.with_suffix(".run")).not_before
    if not_before is None or not_before <= now:
        return True
    with suppress(RedisError, OSError):
        await BatchRegistry(redis).touch(file.stem)  # it may wait for longer than a status is kept
    return False


async def _take_cancelled(redis: Redis, folder: RunFolder) -> None:
    """Take the runs of the inbox whose cancellation is requested."""
    files = [file for file in folder.inbox.glob("batch_*.jsonl") if is_run_id(file.stem) and not file.is_symlink()]
    for run_id in await _cancelled(redis, [file.stem for file in files]):
        if not folder.has(run_id):  # else the request is for that one
            _take(folder, folder.inbox / f"{run_id}.jsonl")


async def _cancelled(redis: Redis, run_ids: Sequence[str]) -> list[str]:
    """Return the runs whose cancellation is requested; none if the server does not answer."""
    with suppress(RedisError, OSError, TimeoutError):
        async with asyncio.timeout(2.0):
            return list(await BatchRegistry(redis).cancels_requested_at(run_ids))
    return []


async def _resume(
    redis: Redis, redis_of: RedisOf, folder: RunFolder, run_dir: Path, options: RunOptions, held: Held
) -> None:
    if not run_paths(run_dir).input.exists():
        return  # another feeder has moved it, or is moving it here
    try:
        with StateFile(run_paths(run_dir).state) as state:
            await _feed(redis, redis_of, folder, run_dir, state, options, held)
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
    options: RunOptions,
    held: Held,
) -> None:
    saved = state.load()
    batch = saved.batch if saved else None
    if batch is None or not batch.ended:
        is_new = saved is None or not saved.sha256  # no line was queued: its input had not been read to its end
        logger.info("%s is %s", run_dir.name, "taken" if is_new else "resumed")
        options = replace(options, models=options.models if is_new else None, id=run_dir.name)
        run = Run(redis, redis_of, run_paths(run_dir), options, state, held=held)
        try:
            batch = await run.run_to_end()
        except BatchRefused as error:
            batch = run.fail([_problem(error)])
            await JobStores(redis_of, endless_retries).delete_run(batch.id, batch.sluice.models)
    await _archive(redis, batch, run_dir, (folder.done if batch.status == "completed" else folder.failed))


def _refused(run_dir: Path, error: BatchRefused) -> Batch:
    """Return a failed status for a run folder with files that no run wrote."""
    batch = replace(new_batch(run_paths(run_dir), RunOptions(id=run_dir.name)), errors=Problems((_problem(error),)))
    return batch.enter("failed", time.time())


def _problem(error: BatchRefused) -> Problem:
    return Problem("refused", f"{error}.")


async def _archive(redis: Redis, batch: Batch, run_dir: Path, parent: Path) -> None:
    """Move an ended run into `parent` and report its end.

    The status is stored before the move, so that a crash cannot hide it from clients and webhooks, and published after
    it, so that its readers find the files. Without a server the run stays in `running`, for the next pass.
    """
    batch = moved(batch, parent / run_dir.name)
    registry = BatchRegistry(redis)
    retries = endless_retries(redis)
    if not await publish(retries, registry.put, batch):
        return
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
        if not is_run_id(file.stem.lstrip(".")) or waits:
            continue
        with suppress(FileNotFoundError):  # another feeder was faster
            if time.time() - file.stat().st_ctime > 86_400:  # a file with another name may have been written long ago
                file.unlink()


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
