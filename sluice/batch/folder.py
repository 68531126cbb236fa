"""A folder of runs: files come into `inbox`, are fed in `running`, and end in `done` or in `failed`."""

import asyncio
import logging
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.batch import names
from sluice.batch.options import RunOptions, RunPaths
from sluice.batch.registry import BatchRegistry
from sluice.batch.run import Run, new_batch, patient, tell
from sluice.batch.state import StateFile
from sluice.batch.status import Batch, Problem, Problems
from sluice.errors import BatchRefused, BatchTaken
from sluice.transport.retries import Retries

logger = logging.getLogger("sluice.batch")

_SIDE_BY_SIDE = 8  # runs: one whose model nobody serves holds up no other
_SETTLED_S = 2.0  # a file that has not grown for so long has been written


@dataclass(frozen=True, slots=True)
class Folder:
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

    def make(self) -> None:
        """Create the subfolders. Raises OSError."""
        for part in (self.inbox, self.running, self.done, self.failed):
            part.mkdir(parents=True, exist_ok=True)

    def has(self, run_id: str) -> bool:
        """True if a run of this id exists."""
        return any(place_in(part / run_id).input.exists() for part in (self.running, self.done, self.failed))


def place_in(home: Path) -> RunPaths:
    """Return the files of a run in its own folder."""
    return RunPaths(home / "input.jsonl", home / "output.jsonl", home / "errors.jsonl", home / "run")


async def submit(redis: Redis, folder: Folder, file: Path) -> Batch:
    """Copy a file into the inbox atomically. Raises OSError."""
    folder.make()
    run_id = names.new_run(file.stem)
    half, whole = folder.inbox / f".{run_id}.part", folder.inbox / f"{run_id}.jsonl"
    try:
        await asyncio.to_thread(shutil.copyfile, file, half)
        batch = new_batch(place_in(folder.running / run_id), RunOptions(id=run_id))
        await Retries(redis, None).run(lambda: BatchRegistry(redis).announce(batch))
        half.rename(whole)
    finally:
        half.unlink(missing_ok=True)
    return batch


async def feed(redis: Redis, folder: Folder, *, take: bool, models: Mapping[str, str]) -> None:
    """Make one pass: take the files of the inbox if `take`, then run everything that no other process feeds, oldest
    first.

    Files are taken first so that another feeder can resume them if this process dies.
    """
    folder.make()
    for file in await _written(folder.inbox) if take else []:
        _take(folder, file)
    turn = asyncio.Semaphore(_SIDE_BY_SIDE)

    async def in_turn(home: Path) -> None:
        async with turn:
            await _go_on(redis, folder, home, models)

    async with asyncio.TaskGroup() as group:
        for file in _oldest_first(folder.running.glob("*/input.jsonl")):
            group.create_task(in_turn(file.parent))


async def _go_on(redis: Redis, folder: Folder, home: Path, models: Mapping[str, str]) -> None:
    if not place_in(home).input.exists():
        return  # another feeder has moved it, or is about to begin with it
    try:
        with StateFile(place_in(home).state) as state:
            await _feed(redis, folder, home, state, models)
    except BatchTaken:
        pass
    except BatchRefused as error:  # else each pass would find it so
        await _put_away(redis, _refused(home, error), home, folder.failed)
    except (RedisError, OSError) as error:
        logger.error("%s waits for the next pass: %s", home.name, error)


async def _feed(redis: Redis, folder: Folder, home: Path, state: StateFile, models: Mapping[str, str]) -> None:
    saved = state.load()
    batch = saved.batch if saved else None
    if batch is None or not batch.ended:
        logger.info("%s is %s", home.name, "resumed" if saved else "taken")
        run = Run(redis, place_in(home), RunOptions(None if saved else models, id=home.name), state)
        try:
            batch = await run.go()
        except BatchRefused as error:
            batch = run.fail([_problem(error)])
    await _put_away(redis, batch, home, (folder.done if batch.status == "completed" else folder.failed))


def _refused(home: Path, error: BatchRefused) -> Batch:
    """Return a failed status for a folder that holds files no run wrote."""
    batch = replace(new_batch(place_in(home), RunOptions(id=home.name)), errors=Problems((_problem(error),)))
    return batch.enter("failed", time.time())


def _problem(error: BatchRefused) -> Problem:
    return Problem("refused", f"{error}.")


async def _put_away(redis: Redis, batch: Batch, home: Path, shelf: Path) -> None:
    """Told before the move, so that no crash hides the end, and after it, so that who hears of it finds the files."""
    batch, board, retries = _moved(batch, shelf / home.name), BatchRegistry(redis), patient(redis)
    await tell(retries, board.put, batch)
    home.rename(shelf / home.name)
    await tell(retries, board.announce, batch)
    counts = batch.request_counts
    logger.info("%s %s: %d of %d lines answered", batch.id, batch.status, counts.completed, counts.total)


def _moved(batch: Batch, new: Path) -> Batch:
    def there(path: str) -> str:
        return str(new / Path(path).name)

    return replace(
        batch,
        input_file_id=there(batch.input_file_id),
        output_file_id=batch.output_file_id and there(batch.output_file_id),
        error_file_id=batch.error_file_id and there(batch.error_file_id),
    )


def _take(folder: Folder, file: Path) -> None:
    known = names.is_run(file.stem) and not folder.has(file.stem)
    home = folder.running / (file.stem if known else names.new_run(file.stem))
    home.mkdir(exist_ok=True)
    try:
        file.rename(place_in(home).input)
    except FileNotFoundError:
        _remove_if_empty(home)  # another feeder was faster


def _remove_if_empty(home: Path) -> None:
    try:
        home.rmdir()
    except OSError:
        pass  # it is the home that the other feeder made for the file


async def _written(inbox: Path) -> list[Path]:
    """The files of which nobody is still writing. What `submit` puts there is whole. A link may lead nowhere once it
    is moved."""
    found = [file for file in inbox.glob("*.jsonl") if not file.name.startswith(".")]
    odd = {file for file in found if file.is_symlink() or (file.exists() and not file.is_file())}
    for other in odd:
        logger.warning("%s stays in the inbox: it is a link, or no file at all", other.name)
    files = [file for file in found if file not in odd]
    before = {file: _stamp(file) for file in files}
    if any(not names.is_run(file.stem) and time.time() - _stamp(file)[0] < _SETTLED_S for file in files):
        await asyncio.sleep(_SETTLED_S)
    return _oldest_first(file for file in files if file.is_file() and _stamp(file) == before[file])


def _oldest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=_stamp)


def _stamp(path: Path) -> tuple[float, int]:
    """When it was written, in Unix seconds, and its size; nothing where another feeder has just moved it."""
    try:
        said = path.stat()
    except FileNotFoundError:
        return 0.0, 0
    return said.st_mtime, said.st_size
