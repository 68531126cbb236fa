"""Runs lines of an ended run again: their new answers take the place of the old ones in its files."""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from redis.asyncio import Redis

from sluice.batch.files import RunState, StateFile
from sluice.batch.folder import moved, run_paths
from sluice.batch.outcomes import NOT_JSON, read_kinds
from sluice.batch.registry import BatchRegistry, RedisOf
from sluice.batch.run import OnProgress, endless_retries, publish, run_batch
from sluice.batch.source import RunOptions, RunPaths, Source, parse_window
from sluice.batch.transitions import RunEvent, run_step
from sluice.contract.batch import Batch, is_run_id
from sluice.errors import BatchRefused


async def rerun_lines(
    redis: Redis,
    run: str | Path,
    kinds: Collection[str],
    options: RunOptions,
    on_progress: OnProgress,
    redis_of: RedisOf,
) -> Batch:
    """Run the lines of these kinds again, of an ended run named by its id or output file, and return its status: at
    its end, or for a run of a folder as soon as it is back in `running`. Each line has its best outcome then, in the
    same files. Without such lines nothing is done. An interrupted rerun is resumed.

    Raises ValueError for an unknown kind, `UnknownBatch`, `BatchRefused`, and otherwise as `run_batch`.
    """
    kinds = read_kinds(kinds)
    output = await _output(redis, str(run)) if is_run_id(str(run)) else Path(run)
    state_path = _state_path(output)
    if state_path.is_dir():
        answers = state_path / f"{output.stem}.answers.jsonl"
        raise BatchRefused(f"{output} is a table: name its run by the id, or by {answers}")
    if not state_path.is_file():
        raise BatchRefused(f"{output} is not the output of a run: there is no {state_path}")
    with StateFile(state_path) as state:
        saved = state.load()
        if saved is None or saved.batch.status == "failed":
            raise BatchRefused(f"{output} is the output of a run that was refused: correct its file, and run that")
        batch = saved.batch
        if saved.remote:
            raise BatchRefused(f"{batch.id} ran at {saved.remote}: lines can be run again where its files are")
        if not batch.ended and batch.sluice.rerun_at is None:
            raise BatchRefused(
                f"{batch.id} is {batch.status}: let it end, or cancel it, before its lines are run again"
            )
        if batch.ended and not any(count_lines(batch, kind) for kind in kinds):
            return batch
        paths = _paths(state_path, output, batch)
        with Source(paths.input, {}) as source:
            if await asyncio.to_thread(source.sha256) != saved.sha256:
                raise BatchRefused(f"{paths.input} is not the file that {batch.id} was started with")
        new = saved
        if batch.ended:
            new, registry = to_run_again(saved, kinds, options.retry), BatchRegistry(redis)
            await endless_retries(redis).run(lambda: registry.forget_cancel(batch.id))
        if _is_of_folder(state_path):
            return await _hand_to_folder(redis, state_path.parent, state, new)
        state.save(new)
    return await run_batch(redis, paths, options, on_progress, redis_of)


def count_lines(batch: Batch, kind: str) -> int:
    """Return the number of lines of this kind in a status, of an earlier version too."""
    if batch.sluice.kinds:
        return batch.sluice.kinds[kind].lines if kind in batch.sluice.kinds else 0
    invalid = batch.sluice.failures.get(NOT_JSON, 0)
    counts = {"cut": batch.sluice.cut_off, "invalid": invalid, "failed": batch.request_counts.failed - invalid}
    return counts.get(kind, 0)


def to_run_again(saved: RunState, kinds: Collection[str], retry: Mapping[str, int] | None) -> RunState:
    """Return the state in which an ended run takes these lines back. Its completion window begins anew."""
    batch, now = saved.batch, int(time.time())
    status, _ = run_step(batch.status, RunEvent.RERUN)
    details = replace(batch.sluice, rerun_at=now, retry=batch.sluice.retry if retry is None else dict(retry))
    batch = replace(
        batch, status=status, sluice=details, expires_at=now + parse_window(batch.completion_window),
        finalizing_at=None, completed_at=None, expired_at=None, cancelling_at=None, cancelled_at=None,
    )  # fmt: skip
    return replace(saved, batch=batch, rerun=tuple(kinds), earlier_s=batch.sluice.seconds)


async def _output(redis: Redis, run_id: str) -> Path:
    """Return the output file of a run, if it is on this machine."""
    run: Batch = await endless_retries(redis).run(lambda: BatchRegistry(redis).read(run_id))
    output = Path(run.output_file_id or "")
    if not output.is_file():
        raise BatchRefused(f"the files of {run_id} are on {run.sluice.host}: its lines can be run again there")
    return output


def _state_path(output: Path) -> Path:
    """Return the state file of the run with this output, which may be in a folder of runs."""
    of_folder = run_paths(output.absolute().parent)
    if of_folder.output == output.absolute() and of_folder.state.exists():
        return of_folder.state
    return output.absolute().with_name(f"{output.name}.run")


def _is_of_folder(state_path: Path) -> bool:
    return state_path == run_paths(state_path.parent).state


def _paths(state_path: Path, output: Path, batch: Batch) -> RunPaths:
    """Return the files of the run. The status of one in a folder may name those before its move."""
    if _is_of_folder(state_path):
        return run_paths(state_path.parent)
    errors = Path(batch.error_file_id) if batch.error_file_id else None
    return RunPaths.next_to_output(Path(batch.input_file_id), output, errors)


async def _hand_to_folder(redis: Redis, run_dir: Path, state: StateFile, new: RunState) -> Batch:
    """Move a run back into `running`, where the folder's workers resume it, and report that.

    If it crashes between the two, the run has still ended, and the next feeder moves it back.
    """
    running = run_dir.parent.parent / "running" / run_dir.name
    if run_dir != running:
        run_dir.rename(running)
    new = replace(new, batch=moved(new.batch, running))
    state.save(new)
    await publish(endless_retries(redis), BatchRegistry(redis).announce, new.batch)
    return new.batch
