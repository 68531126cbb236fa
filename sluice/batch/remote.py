"""Offline runs over HTTP, by the Files and Batches of OpenAI's interface: at a gateway, or at any other server that has
them."""

import asyncio
import json
import logging
import math
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx

from sluice.contract.batch import Batch, Problem, Problems
from sluice.errors import SluiceError

logger = logging.getLogger("sluice.batch")

T = TypeVar("T")


class RemoteError(SluiceError):
    """A server over HTTP refused a request, or did not answer. `status` is that of its answer; None without one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message, status)
        self.message = message
        self.status = status

    def __str__(self) -> str:
        return self.message


class _Passing(Exception):
    """Another try may succeed, not before `wait_s` seconds if the server has named them."""

    def __init__(self, message: str, status: int | None = None, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.wait_s = status, wait_s


class RemoteBatches:
    """The offline runs of a server. Use it in an `async with` block."""

    def __init__(self, url: str, key: str | None = None, *, patience_s: float = 30.0) -> None:
        """`url`: such as http://localhost:8000, or with the path of the interface if that is not /v1. `patience_s`: for
        how long requests are repeated that end with 429 or 5xx, or whose connection breaks; only a server that has
        not answered yet is not waited for. Raises ValueError for a bad URL or key."""
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("the key holds characters that no key has")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience_s = patience_s
        self._answered = False
        self._http = httpx.AsyncClient(
            base_url=_base_url(url),
            # An answer in a coding could not be continued by its position.
            headers={"accept-encoding": "identity", **({"authorization": f"Bearer {key}"} if key else {})},
            timeout=httpx.Timeout(60.0, connect=10.0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def batch_status(self, batch_id: str) -> Batch:
        """Return the status of a run. Raises `RemoteError`."""
        return self._batch(await self._json("GET", f"batches/{_segment(batch_id)}"))

    async def batches(self) -> list[Batch]:
        """Return the runs of the last week, oldest first. Raises `RemoteError`."""
        since = time.time() - 7 * 86_400
        found = list[Batch]()
        async for batch in self._newest_first():
            if batch.created_at < since:
                break
            found.append(batch)
        return found[::-1]

    async def cancel_batch(self, batch_id: str) -> Batch:
        """Request the cancellation of a run, and return its status before. Raises `RemoteError`."""
        batch = await self.batch_status(batch_id)
        if not batch.ended:
            try:
                await self._json("POST", f"batches/{_segment(batch_id)}/cancel")
            except RemoteError:
                batch = await self.batch_status(batch_id)  # it may have ended meanwhile
                if not batch.ended:
                    raise
        return batch

    async def upload(self, file: Path, mapped: BinaryIO | None = None) -> str:
        """Upload a file, or in its name what it became by a mapping, and return the id at the server. Raises
        `RemoteError` or OSError."""

        async def send() -> Any:
            with ExitStack() as stack:
                content = mapped or stack.enter_context(file.open("rb"))
                content.seek(0)
                parts = {"file": (file.name, content, "application/jsonl")}
                return await self._once("POST", "files", data={"purpose": "batch"}, files=parts)

        return str(self._field(await self._retried(send), "id"))

    async def has_file(self, file_id: str) -> bool:
        """Return True if the server has the file."""
        try:
            await self._json("GET", f"files/{_segment(file_id)}")
        except RemoteError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def delete_file(self, file_id: str) -> None:
        """Delete a file that is of no use any more. A failure is ignored: files expire."""
        with suppress(RemoteError, _Passing):
            await self._once("DELETE", f"files/{_segment(file_id)}")

    async def start(self, batch: Batch) -> Batch:
        """Start the run of an uploaded file, and only one: the answer to an earlier try may have been lost. Raises
        `RemoteError`."""
        names = "input_file_id", "endpoint", "completion_window", "metadata"
        given = {name: value for name in names if (value := getattr(batch, name)) is not None}

        async def find_or_start() -> Batch:
            found = await self._run_of(batch.input_file_id)
            return found or self._batch(await self._once("POST", "batches", json=given))

        return await self._retried(find_or_start)

    async def download(self, file_id: str, into: BinaryIO) -> None:
        """Write the content of a file of the server. Raises `RemoteError` or OSError."""
        await self._retried(lambda: self._download(f"files/{_segment(file_id)}/content", into))

    async def serves(self, model: str) -> bool:
        """Return False if the server denies to have the model."""
        try:
            await self._json("GET", f"models/{quote(model)}")
        except RemoteError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def served(self) -> list[str]:
        """Return the names of the server's models; none if it does not list them."""
        try:
            listed = self._items(await self._json("GET", "models"))
        except RemoteError as error:
            if error.status in _NOT_OFFERED:
                return []
            raise
        return [str(self._field(each, "id")) for each in listed]

    async def _download(self, path: str, into: BinaryIO) -> None:
        begun = into.seek(0, os.SEEK_END)
        headers = {"range": f"bytes={begun}-"} if begun else {}
        try:
            async with self._http.stream("GET", path, headers=headers) as response:
                if response.status_code == 416:  # all of it is there, or it is another file
                    into.truncate(0)
                if response.is_error:
                    await response.aread()
                    self._check(response)
                if response.headers.get("content-encoding", "identity") != "identity":
                    self._raise_foreign("the content of a file, in a coding that was not requested,")
                if response.status_code != 206:
                    into.seek(0)
                    into.truncate()
                async for part in response.aiter_raw():
                    into.write(part)
        except httpx.RequestError as error:
            raise self._broken(error) from error

    async def _run_of(self, file_id: str) -> Batch | None:
        """Return the run of an uploaded file, if there is one and the server lists its runs."""
        try:
            file = await self._once("GET", f"files/{_segment(file_id)}")
            async for batch in self._newest_first():
                if batch.input_file_id == file_id:
                    return batch
                if batch.created_at < file.get("created_at", 0):
                    break
        except RemoteError as error:
            if error.status not in _NOT_OFFERED:
                raise
        return None

    async def _newest_first(self) -> AsyncIterator[Batch]:
        after: dict[str, str] = {}
        while True:
            page = await self._json("GET", "batches", params={"limit": "100", **after})
            batches = [self._batch(each) for each in self._items(page)]
            for batch in batches:
                yield batch
            if not batches or not page.get("has_more"):
                return
            after = {"after": batches[-1].id}

    async def _json(self, method: str, path: str, **how: Any) -> Any:
        return await self._retried(lambda: self._once(method, path, **how))

    async def _retried(self, once: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call that is repeated while it raises `_Passing`. Raises `RemoteError`."""
        pause_s, told = 0.5, ""
        until = math.inf
        while True:
            try:
                return await once()
            except _Passing as passing:
                # Many clients of a server that comes back shall not come back at the same time.
                wait_s = passing.wait_s or pause_s * random.uniform(0.5, 1.0)
                until = min(until, time.monotonic() + self._patience_s)
                if time.monotonic() + wait_s > until:
                    raise RemoteError(f"{passing}.", passing.status) from passing
                if str(passing) != told:
                    told = str(passing)
                    logger.warning("%s: trying again", told)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, 10.0)

    async def _once(self, method: str, path: str, **how: Any) -> Any:
        """Send a request once, and return the JSON of its answer. Raises `_Passing` if another try may succeed, else
        `RemoteError`."""
        try:
            response = await self._http.request(method, path, **how)
        except httpx.RequestError as error:
            raise self._broken(error) from error
        self._check(response)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        return answer if isinstance(answer, dict) else self._raise_foreign(path)

    def _broken(self, error: httpx.RequestError) -> _Passing | RemoteError:
        reason = str(error) or type(error).__name__
        passes = isinstance(error, httpx.TimeoutException | httpx.NetworkError | httpx.RemoteProtocolError)
        if self._answered and passes:
            return _Passing(f"{self.url} does not answer: {reason}")
        return RemoteError(f"no server answers at {self.url}: {reason}.")

    def _check(self, response: httpx.Response) -> None:
        self._answered = True
        status = response.status_code
        if response.is_success:
            return
        message = f"{self.url} answers with {status}: {_reason(response).rstrip('.')}"
        passes = status in (408, 409, 416, 429) or (status >= 500 and status not in _NOT_OFFERED)
        should_retry = response.headers.get("x-should-retry", str(passes).lower()) == "true"
        if (passes and should_retry) or status == 416:
            raise _Passing(message, status, _seconds(response.headers.get("retry-after")))
        raise RemoteError(f"{message}.", status)

    def _batch(self, answer: Any) -> Batch:
        try:
            return _parse(answer)
        except (KeyError, TypeError, ValueError, AttributeError):
            self._raise_foreign("batches")

    def _field(self, answer: Any, name: str) -> Any:
        try:
            return answer[name]
        except (KeyError, TypeError):
            self._raise_foreign(name)

    def _items(self, page: Any) -> list[Any]:
        found = self._field(page, "data")
        return found if isinstance(found, list) else self._raise_foreign("a list")

    def _raise_foreign(self, what: str) -> NoReturn:
        raise RemoteError(f"{self.url} does not have OpenAI's interface: its answer for {what} is another object.")


_NOT_OFFERED = frozenset({404, 405, 501})


def _parse(answer: Mapping[str, Any]) -> Batch:
    """Return the status in an answer, in which a server may leave out what OpenAI does not require."""
    fields = _without_nulls(answer)
    problems = (fields.pop("errors", None) or {}).get("data") or []
    batch = Batch.from_json(json.dumps({"input_file_id": "", "request_counts": {}, **fields}))
    if problems:
        told = (Problem(each.get("code", "error"), each.get("message", ""), each.get("line"), each.get("param"))
                for each in problems)  # fmt: skip
        batch = replace(batch, errors=Problems(tuple(told)))
    ended_at = batch.completed_at or batch.expired_at or batch.cancelled_at
    if "sluice" not in fields and ended_at and batch.in_progress_at:
        batch = replace(batch, sluice=replace(batch.sluice, seconds=float(ended_at - batch.in_progress_at)))
    return batch


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _base_url(url: str) -> str:
    """Return the URL that the paths of the interface follow. Raises ValueError."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(f"{url!r} is not a URL such as http://localhost:8000")
    if parts.username is not None:
        raise ValueError("the URL must not hold a user or a password: give a key")
    return f"{url.rstrip('/')}/" if parts.path.strip("/") else f"{url.rstrip('/')}/v1/"


def _segment(id: str) -> str:
    return quote(id, safe="")


def _reason(response: httpx.Response) -> str:
    """Return the server's own message, if it is in OpenAI's form."""
    try:
        match response.json():
            case {"error": {"message": str(message)}} | {"error": str(message)} | {"detail": str(message)}:
                return message
    except ValueError:
        pass
    return response.headers.get("location") or response.reason_phrase


def _seconds(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None if it has a date, which no such server sends."""
    return min(float(text), 60.0) if text and text.isdigit() else None
