"""`Idempotency-Key`: a retried request finds the job of the first one."""

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.resources import files

from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.requests import Request

from sluice import wire
from sluice.errors import SluiceError
from sluice.gateway.caller import Caller
from sluice.gateway.errors import ApiError, was_refused
from sluice.transport.retries import Retries

HEADER = "idempotency-key"
_MAX_CHARACTERS = 255
_LIFE_S = wire.JOB_LIFE_S + wire.RESULT_TTL_S  # as long as a job may be known
_QUEUED = " queued"  # behind the digest, once the request has queued its jobs
_GONE = 410


def key_of(request: Request) -> str | None:
    """Return the request's key. Raises `ApiError` for an empty or a very long one."""
    key = request.headers.get(HEADER)
    if key is not None and not 1 <= len(key) <= _MAX_CHARACTERS:
        raise ApiError(400, f"Idempotency-Key: it must have 1 to {_MAX_CHARACTERS} characters.", code="invalid_key")
    return key


def job_id(caller: Caller, route: str, key: str, prefix: str) -> str:
    """Return the id of the job that belongs to a key: the same in every front."""
    return f"{prefix}{hashlib.sha256(repr((caller.tenant, route, key)).encode()).hexdigest()[:32]}"


def claim_key(job_id: str) -> str:
    """String: the digest of the body that the key of this job came with, and `queued` behind it once the job was."""
    return f"sluice:serve:key:{job_id}"


class IdempotencyKeys:
    """Claims keys for the bodies that they came with."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries
        self._release = redis.register_script((files(__package__) / "lua" / "release_key.lua").read_text())

    @asynccontextmanager
    async def claimed(self, base: str, job_ids: Sequence[str], body_digest: str) -> AsyncIterator[bool]:
        """Hold a key for its body while the jobs are queued. `base` is the id that the key stands for.

        Yields True if the jobs were queued before: the block has to queue nothing. If the block ends in a refusal, the
        key is free again. Raises `ApiError` 409 if the key came with another body before, and `SluiceError`."""
        claim = claim_key(base)
        send = partial(self._redis.set, claim, body_digest, nx=True, get=True, ex=_LIFE_S)
        earlier: bytes | None = await self._retries.run(send)
        digest, *queued = (earlier or body_digest.encode()).decode().split()
        if digest != body_digest:
            message = "Idempotency-Key: the key was used with another body; use a new key for a new request."
            raise ApiError(409, message, code="idempotency_key_reused")
        try:
            yield bool(queued)
        except (ApiError, SluiceError) as error:
            if was_refused(error) and not queued:
                await self._free(claim, job_ids, body_digest)
            raise
        if not queued:
            await self._retries.run(lambda: self._redis.set(claim, body_digest + _QUEUED, ex=_LIFE_S))

    async def _free(self, claim: str, job_ids: Sequence[str], body_digest: str) -> None:
        """Delete the claim unless one of its jobs was queued: by the same request, or by another with the same key."""
        jobs = [key(job_id) for job_id in job_ids for key in (wire.job_key, wire.body_key)]
        with suppress(SluiceError, RedisError):  # the refusal itself matters more
            await self._retries.run(lambda: self._release(keys=[claim, *jobs], args=[body_digest]))


def expired(remedy: str) -> ApiError:
    """Return the error for a key whose answer, or its events, have expired or were deleted."""
    return ApiError(_GONE, f"Idempotency-Key: {remedy}", code="answer_expired")
