"""What the routes of files and of batches share: the folder, threads for its disk, and pages of lists."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from sluice.batch.files import RunState, read_state
from sluice.batch.folder import RunFolder, find_run, run_ids
from sluice.batch.store import FileStore, StoreFull
from sluice.contract.batch import Batch
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError

logger = logging.getLogger("sluice.gateway")

# The disk is slow at times, and then delays files alone: nothing else uses these threads.
_pool = ThreadPoolExecutor(4, thread_name_prefix="sluice-files")

P = ParamSpec("P")
T = TypeVar("T")


async def on_disk(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what the work returns, done in one of the threads for files. If cancelled, waits for its end first.
    Raises its errors, and `ApiError` for those of the disk."""
    working = asyncio.get_running_loop().run_in_executor(_pool, partial(work, *args, **kwargs))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
    except StoreFull as error:
        raise ApiError(ErrorForm.STORAGE_EXCEEDED, f"file: {error}.", param="file") from None
    except FileNotFoundError:
        raise ApiError(ErrorForm.NOT_FOUND, "The file was deleted meanwhile.") from None
    except OSError as error:
        logger.error("files of batches: %s", error)
        message = f"the gateway's disk refused the file: {error.strerror or error}; tell its operator."
        raise ApiError(ErrorForm.STORAGE_FULL, message, retryable=False) from None


class Shared:
    """The folder of runs and files that gateways and workers share."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: there is no folder, and every use of it raises `ApiError` 404."""
        self._path = None if path is None else path.absolute()
        self._swept_at = -1e9
        if self._path is not None:
            with suppress(OSError):  # the first request tells it
                FileStore(self._path).make()

    @property
    def folder(self) -> RunFolder:
        """The folder. Raises `ApiError`."""
        if self._path is None:
            message = "This gateway has no files and batches: its operator has to set SLUICE_SERVE_BATCH_DIR."
            raise ApiError(ErrorForm.NOT_FOUND, message)
        return RunFolder(self._path)

    @property
    def store(self) -> FileStore:
        """The files. Raises `ApiError`."""
        return FileStore(self.folder.root)

    async def open(self) -> None:
        """Sweep the files once a minute. Raises `ApiError` if there is no folder."""
        store = self.store
        if time.monotonic() - self._swept_at > 60:
            self._swept_at = time.monotonic()
            await on_disk(store.make)

    def find(self, tenant: str | None, run_id: str) -> RunState | None:
        """Return the saved state of a run of the tenant; None if it has no such run. Blocks."""
        state = find_run(self.folder, run_id)
        return state if state is not None and tenant in (None, state.batch.sluice.tenant) else None

    def runs(self, tenant: str | None) -> list[Batch]:
        """Return the saved states of the tenant's runs, the newest first; of ended ones without problems. Blocks."""
        runs = filter(None, (self._cached(run_id) for run_id in run_ids(self.folder)))
        found = [batch for batch in runs if tenant in (None, batch.sluice.tenant)]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def with_problems(self, runs: Sequence[Batch]) -> list[Batch]:
        """Return these runs with the problems of their files. Blocks."""
        states = [find_run(self.folder, run.id) if run.status == "failed" else None for run in runs]
        return [run if state is None else state.batch for run, state in zip(runs, states, strict=True)]

    def _cached(self, run_id: str) -> Batch | None:
        """Return the state of a run. The files of runs that have ended are read once."""
        for part in (self.folder.done, self.folder.failed):
            path = part / run_id / "run"
            with suppress(FileNotFoundError, NotADirectoryError):
                status = path.stat()
                return _ended(path, status.st_mtime_ns, status.st_size)
        state = find_run(self.folder, run_id)
        return state.batch if state else None


@lru_cache(10_000)  # some kilobytes each: a run may have a thousand problems
def _ended(path: Path, mtime_ns: int, size: int) -> Batch | None:
    state = read_state(path)
    return replace(state.batch, errors=None) if state else None


def limit_of(request: Request, most: int, default: int) -> int:
    """Return the number of objects in a page. Raises `ApiError`."""
    text = request.query_params.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
        raise ApiError(ErrorForm.INVALID_VALUE, f"limit: it must be a number from 1 to {most:,}.", param="limit")
    return int(text)


def page_of(objects: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return OpenAI's form of a page of a list."""
    ids = [each["id"] for each in objects]
    return {
        "object": "list",
        "data": list(objects),
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }


def seconds_of(value: object, name: str) -> int:
    """Return the seconds of an `expires_after`. Raises `ApiError`."""
    match value:  # the limits are OpenAI's
        case {"anchor": "created_at", "seconds": int(seconds), **rest} if not rest and 3_600 <= seconds <= 2_592_000:
            return seconds
    message = f'{name}: it must be {{"anchor": "created_at", "seconds": N}} with N from 3600 to 2592000.'
    raise ApiError(ErrorForm.INVALID_VALUE, message, param=name)
