"""Runs a file at a server over HTTP: uploads it, waits for the end, and fetches the answers. Repeated, it goes on from
the file with the state next to the output."""

import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from sluice.batch.files import RunState, StateFile
from sluice.batch.remote import RemoteBatches, RemoteError
from sluice.batch.run import OnProgress, describe_unserved, give_options, new_batch
from sluice.batch.source import DEFAULT_WINDOW, RunOptions, RunPaths, Source
from sluice.contract.batch import NO_LINES, Batch, Problem, Problems
from sluice.errors import BatchRefused
from sluice.presence import mapped_name


async def run_remote(
    remote: RemoteBatches,
    input: Path,
    output: Path,
    *,
    errors: Path | None = None,
    on_progress: OnProgress = lambda batch: None,
    **options: Any,
) -> Batch:
    """Run a file to its end at a server, fetch the answers, and return the final status, whose files are the local
    ones. The run goes on at the server if this is cancelled.

    `options`: of `RunOptions`; the names of models are mapped before the lines are sent. Raises `BatchRefused`,
    `RemoteError`, ValueError for bad options, or OSError if a file cannot be read or written.
    """
    paths, chosen = RunPaths.next_to_output(input, output, errors), _read(options)
    with ExitStack() as stack:
        source = stack.enter_context(Source(paths.input, {}))  # readable, before any file is created
        if not paths.state.exists():
            paths.refuse_to_overwrite()
        state = stack.enter_context(StateFile(paths.state))
        stack.callback(_remove_if_new, state)
        sha256 = await asyncio.to_thread(source.sha256)
        return await _RemoteRun(remote, paths, chosen, state, on_progress).to_end(sha256)


async def submit_remote(remote: RemoteBatches, input: Path, **options: Any) -> Batch:
    """Upload a file and start its run. `options`: of `RunOptions`. Raises `BatchRefused`, `RemoteError` or OSError, and
    ValueError for bad options."""
    with Source(input, {}):  # not a pipe, whose opening blocks
        return await remote.start(await _upload(remote, input, _read(options)))


def _read(options: Mapping[str, Any]) -> RunOptions:
    """Return the options of a run. Raises ValueError for one that its server does not receive."""
    sent = "models", "completion_window", "metadata", "served_only"
    for name in (name for name, value in options.items() if value and name not in sent):
        raise ValueError(f"{name}: a server over HTTP does not take it; leave it out with --url")
    return RunOptions(**{name: value for name, value in options.items() if name in sent})


async def _upload(remote: RemoteBatches, input: Path, options: RunOptions) -> Batch:
    """Upload a file with the names of its models mapped. Returns the status of its run, without an id."""
    models = options.models or {}
    with tempfile.TemporaryFile() as mapped:
        lines = await asyncio.to_thread(_Lines.read, input, models, mapped if models else None)
        file_id = await remote.upload(input, mapped if models else None)
    return Batch(
        id="",
        input_file_id=file_id,
        endpoint=lines.endpoint,  # type: ignore[arg-type]
        completion_window=options.completion_window or DEFAULT_WINDOW,
        status="validating",
        created_at=int(time.time()),
        request_counts=NO_LINES,
        metadata=None if options.metadata is None else dict(options.metadata),
    )


class _RemoteRun:
    """One run of a server whose state file this process has locked."""

    def __init__(
        self,
        remote: RemoteBatches,
        paths: RunPaths,
        options: RunOptions,
        state: StateFile,
        on_progress: OnProgress,
    ) -> None:
        self._remote = remote
        self._paths = paths
        self._options = options
        self._state = state
        self._on_progress = on_progress

    async def to_end(self, sha256: str) -> Batch:
        saved = self._resumable(sha256)
        if saved is None and self._options.served_only and (message := await self._unserved()):
            return self._refused(message)
        if saved is None or not (saved.batch.id or await self._remote.has_file(saved.batch.input_file_id)):
            batch = await _upload(self._remote, self._paths.input, self._options)
            saved = self._save(RunState(batch, sha256, self._options.models or {}, remote=self._remote.url), batch)
        if not saved.batch.id:
            saved = self._save(saved, await self._remote.start(saved.batch))
        if not saved.batch.ended:
            batch = await self._until_ended(saved.batch.id)
            if batch.status == "failed":  # refused, and no line was run
                await self._remote.delete_file(batch.input_file_id)
                self._state.remove()
                return replace(batch, input_file_id=str(self._paths.input))
            await self._fetch(batch)
            saved = self._save(saved, batch)
        return self._with_local_files(saved.batch)

    def _resumable(self, sha256: str) -> RunState | None:
        """Return the saved state; None for a new run. Raises `BatchRefused` if it is that of another run."""
        saved = self._state.load()
        if saved is None or saved.batch.status == "failed":
            self._paths.refuse_to_overwrite()
            return None
        different = _difference(saved, self._remote.url, sha256, self._options.models)
        if different and saved.remote and not saved.batch.id:
            return None  # nothing was started
        if different:
            rest = "has ended" if saved.batch.ended else "has not ended"
            raise BatchRefused(
                f"{self._paths.output} is the output of {saved.batch.id}, which {rest} and was started with "
                f"{different}: use the same, or name another output"
            )
        return saved

    async def _unserved(self) -> str | None:
        """Return a message if the server has models, but not one that lines are for."""
        if not (served := await self._remote.served()):
            return None
        models = self._options.models or {}
        named = (await asyncio.to_thread(_Lines.read, self._paths.input, models, None)).models
        unlisted = [name for name, _ in named.most_common(20) if name not in served]  # a request for each
        found = [name for name in unlisted if await self._remote.serves(name)]
        return describe_unserved(named, {*served, *found}, models, give_options)

    def _refused(self, message: str) -> Batch:
        """Return the status of a run that was not started."""
        problems = Problems((Problem("unserved_model", f"{message}."),))
        return replace(new_batch(self._paths, self._options), errors=problems).enter("failed", time.time())

    async def _until_ended(self, batch_id: str) -> Batch:
        began = time.monotonic()
        while True:
            batch = await self._status(batch_id)
            if batch.request_counts.total:
                self._on_progress(batch)
            if batch.ended:
                return batch
            # A run of seconds is followed closely, and one of hours with few requests.
            await asyncio.sleep(min(10.0, max(0.5, (time.monotonic() - began) / 20)))

    async def _status(self, batch_id: str) -> Batch:
        try:
            return await self._remote.batch_status(batch_id)
        except RemoteError as error:
            if error.status == 404:
                raise RemoteError(f"{error} To run the file again, remove {self._paths.state}.", 404) from None
            raise

    async def _fetch(self, batch: Batch) -> None:
        for file_id, path in ((batch.output_file_id, self._paths.output), (batch.error_file_id, self._paths.errors)):
            if file_id is None and path == self._paths.errors:
                continue
            with path.open("wb") as file:
                if file_id is not None:
                    await self._remote.download(file_id, file)
                file.flush()
                os.fsync(file.fileno())

    def _save(self, saved: RunState, batch: Batch) -> RunState:
        state = replace(saved, batch=batch)
        self._state.save(state)
        return state

    def _with_local_files(self, batch: Batch) -> Batch:
        return replace(
            batch,
            input_file_id=str(self._paths.input),
            output_file_id=str(self._paths.output),
            error_file_id=batch.error_file_id and str(self._paths.errors),
        )


def _remove_if_new(state: StateFile) -> None:
    """Leave no file of a run that did not begin."""
    if state.load() is None:
        state.remove()


def _difference(saved: RunState, url: str, sha256: str, models: Mapping[str, str] | None) -> str | None:
    """Return how the saved run differs from the requested one, as a noun phrase; None if it can be resumed."""
    if saved.remote != url:
        return f"--url {saved.remote}" if saved.remote else "--redis-url"
    if saved.sha256 != sha256:
        return "another input"
    if models is not None and dict(models) != dict(saved.models):
        return "another --map or --model"
    return None


@dataclass(slots=True)
class _Lines:
    """The parts of a file that its server is told, or asked for."""

    endpoint: str
    models: Counter[str]  # number of lines by the model's name

    @classmethod
    def read(cls, file: Path, models: Mapping[str, str], mapped: BinaryIO | None) -> Self:
        """Read a file, and write its lines with their models mapped to `mapped`. Lines that are wrong are written as
        they are: the server reports them. Blocks while it reads."""
        endpoints, named = Counter[str](), Counter[str]()
        with file.open("rb") as lines:
            for raw in lines:
                line = _object(raw)
                body = line.get("body")
                if isinstance(body, dict) and isinstance(body.get("model"), str | None):
                    model = body.get("model")
                    name = mapped_name(model, models) if isinstance(model, str) else models.get("*", "default")
                    named[name] += 1
                    endpoints[str(line.get("url"))] += 1
                    if mapped is not None and name != model:
                        raw = json.dumps({**line, "body": {**body, "model": name}}).encode() + b"\n"
                if mapped is not None:
                    mapped.write(raw)
        return cls(next(iter(endpoints), "/v1/chat/completions"), named)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
