"""A retried request finds the job of the first one: by its `Idempotency-Key`, or by its body if the client of the first
one has left."""

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.resources import files
from typing import Any

from redis.exceptions import RedisError
from starlette.requests import Request

from sluice.client import Client
from sluice.contract import keys
from sluice.errors import SluiceError
from sluice.gateway.body import Body, in_thread_if_long
from sluice.gateway.caller import Caller
from sluice.gateway.errors import RETRY_S, was_refused
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError

logger = logging.getLogger("sluice.gateway")

_LIFE_S = keys.JOB_LIFE_S + keys.RESULT_TTL_S  # as long as a job may be known
_VERSION = "1"  # of the registrations, and of the ids that follow from keys: gateways of another version refuse them
_QUEUED = "queued"  # the last word, once the request has queued its jobs


def key_of(request: Request) -> str | None:
    """Return the request's key. Raises `ApiError` for an empty or a very long one."""
    key = request.headers.get("idempotency-key")
    most_characters = 255
    if key is not None and not 1 <= len(key) <= most_characters:
        message = f"Idempotency-Key: it must have 1 to {most_characters} characters."
        raise ApiError(ErrorForm.INVALID_IDEMPOTENCY_KEY, message)
    return key


def job_id(caller: Caller, route: str, key: str, prefix: str) -> str:
    """Return the id of the job that belongs to a key: the same in every gateway."""
    return f"{prefix}{hashlib.sha256(repr((caller.tenant, route, key)).encode()).hexdigest()[:32]}"


async def retry_key(caller: Caller, route: str, body: Body) -> str:
    """Return the key under which the jobs of this request wait for its retry, for `Jobs.leave`: the same in every
    gateway. How the answer is sent does not count: Claude Code repeats a stream that broke off without `stream`. The
    order of members does not either: Codex writes them in another order each time."""
    digest = await in_thread_if_long(body.length, _digest, body.content)
    sender = repr((caller.tenant, caller.key_id, route, digest))
    return left_key(hashlib.sha256(sender.encode()).hexdigest()[:32])


def left_key(digest: str) -> str:
    """Hash: the ids of the jobs of an answer whose client has left, with spaces between, by Unix seconds."""
    return f"sluice:serve:left:{digest}"


def _digest(content: dict[str, Any]) -> str:
    counted = {name: value for name, value in content.items() if name not in ("stream", "stream_options")}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


def registration_key(job_id: str) -> str:
    """String: the version of the format, the digest of the body that the key of this job came with, and `queued` once
    the job was, with spaces between."""
    return f"sluice:serve:key:{job_id}"


class IdempotencyKeys:
    """Registers keys for the bodies that they came with."""

    def __init__(self, client: Client) -> None:
        self._noting = set[asyncio.Task[None]]()
        self._unregister = client.redis.register_script(
            (files(__package__) / "lua" / "unregister_key.lua").read_text("utf-8")
        )

    @asynccontextmanager
    async def registered(self, at: Client, base: str, job_ids: Sequence[str], body_digest: str) -> AsyncIterator[bool]:
        """Register a key for its body while the jobs are queued. `at`: the server that gets them; `base`: the id that
        the key stands for.

        Yields True if the jobs were queued before: the block has to queue nothing. If the block ends in a refusal, the
        key is free again. Raises `ApiError` 409 if the key came with another body before, or if a gateway of another
        version has registered it; and `SluiceError`."""
        key, registration = registration_key(base), f"{_VERSION} {body_digest}"
        send = partial(at.redis.set, key, registration, nx=True, get=True, ex=_LIFE_S)
        earlier: bytes | None = await at.retries.run(send)
        was_queued = earlier is not None and _was_queued(earlier, body_digest)
        try:
            yield was_queued
        except (ApiError, SluiceError, RedisError) as error:
            if was_refused(error) and not was_queued:
                await self._free(at, key, job_ids, registration)
            raise
        if not was_queued:
            task = asyncio.create_task(self._note_queued(at, key, registration))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)

    async def _note_queued(self, at: Client, key: str, registration: str) -> None:
        """Note in a registration that its jobs are queued. No request waits for it: without the note, a retry queues
        the jobs again, which has no effect while they are known."""
        try:
            await at.retries.run(lambda: at.redis.set(key, f"{registration} {_QUEUED}", ex=_LIFE_S))
        except (SluiceError, RedisError) as error:
            logger.warning("%s: it was not noted that its jobs are queued: %s", key, error)

    async def _free(self, at: Client, key: str, job_ids: Sequence[str], registration: str) -> None:
        """Delete the registration unless one of its jobs was queued, by this request or by another with its key."""
        jobs = [key(job_id) for job_id in job_ids for key in (keys.job, keys.body)]
        with suppress(SluiceError, RedisError):  # the refusal itself matters more
            await at.retries.run(lambda: self._unregister([key, *jobs], [registration], client=at.redis))


def _was_queued(earlier: bytes, body_digest: str) -> bool:
    """Return True if the jobs of an earlier registration were queued. Raises `ApiError` 409 for another body or
    version."""
    version, digest, *queued = [*earlier.decode("utf-8", "replace").split(), "", ""]
    if version != _VERSION:
        raise other_version()
    if digest != body_digest:
        message = "Idempotency-Key: the key was used with another body; use a new key for a new request."
        raise ApiError(ErrorForm.IDEMPOTENCY_KEY_REUSED, message)
    return _QUEUED in queued


def other_version() -> ApiError:
    """Return the error for a key that a gateway of another version has registered. The client may try again: the
    request may reach a gateway of that version."""
    message = "Idempotency-Key: another version of the gateway uses the key; try again, or use a new key."
    return ApiError(ErrorForm.IDEMPOTENCY_KEY_IN_USE, message, retry_after_s=RETRY_S, retryable=True)


def expired(remedy: str, field: str = "Idempotency-Key") -> ApiError:
    """Return the error for a key, or an id, whose answer or its events have expired or were deleted."""
    return ApiError(ErrorForm.ANSWER_EXPIRED, f"{field}: {remedy}")
