"""`Idempotency-Key`: a retried request finds the job of the first one."""

import hashlib

from redis.asyncio import Redis
from starlette.requests import Request

from sluice import wire
from sluice.gateway.caller import Caller
from sluice.gateway.errors import ApiError
from sluice.transport.retries import Retries

HEADER = "idempotency-key"
_MAX_CHARACTERS = 255
_LIFE_S = wire.JOB_LIFE_S + wire.RESULT_TTL_S  # as long as a job may be known


def key_of(request: Request) -> str | None:
    """Return the request's key. Raises `ApiError` for an empty or a very long one."""
    key = request.headers.get(HEADER)
    if key is not None and not 1 <= len(key) <= _MAX_CHARACTERS:
        raise ApiError(400, f"Idempotency-Key: it must have 1 to {_MAX_CHARACTERS} characters.", code="invalid_key")
    return key


def job_id(caller: Caller, route: str, key: str, prefix: str) -> str:
    """Return the id of the job that belongs to a key: the same in every front."""
    return f"{prefix}{hashlib.sha256(repr((caller.tenant, route, key)).encode()).hexdigest()[:32]}"


async def claim(redis: Redis, retries: Retries, job_id: str, body_digest: str) -> None:
    """Record the body that the key of this job came with. Raises `ApiError` 409 if it came with another body before."""
    record = f"sluice:serve:key:{job_id}"
    earlier: bytes | None = await retries.run(lambda: redis.set(record, body_digest, nx=True, get=True, ex=_LIFE_S))
    if earlier is not None and earlier.decode() != body_digest:
        message = "Idempotency-Key: the key was used with another body; use a new key for a new request."
        raise ApiError(409, message, code="idempotency_key_reused")
