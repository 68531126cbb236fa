"""Reads a queued body: arq's `{t, f, a, k, et}`, as JSON, with one argument."""

from collections.abc import Mapping
from typing import Any

from arq.cron import CronJob
from arq.worker import Function

from schemas import keys
from worker.bounded_json.reader import Reader
from worker.errors import JobFailure
from worker.queue.job.claims import Claim

Functions = Mapping[str, Function | CronJob]


async def open_envelope(
    claim: Claim, body: bytes, reader: Reader, functions: Functions, most_bytes: int
) -> tuple[Function | CronJob, Any]:
    """Return the function to call and its argument. Nothing in the body is executed. Raises `JobFailure`."""
    if not keys.is_job_id(claim.job_id):
        raise JobFailure("invalid_request", f"A job id must match {keys.JOB_ID}.")
    if claim.body_bytes > most_bytes:
        raise JobFailure("too_large", f"The job is {claim.body_bytes:,} bytes; this worker accepts {most_bytes:,}.")
    if not body:
        raise JobFailure(
            "invalid_request", "The job's body has expired or was deleted; submit it again.", retryable=True
        )
    name, args = _named(await reader.parse(body, claim.lane, claim.tenant))
    if name not in functions:
        known = ", ".join(sorted(functions))
        raise JobFailure("invalid_request", f"The function {name[:64]!r} does not exist; this worker has: {known}.")
    return functions[name], args[0]


def _named(envelope: Any) -> tuple[str, list[Any]]:
    match envelope:
        case {"f": str(name), "a": [_] as args, "k": {**kwargs}} if not kwargs:
            return name, args
        case {"f": str()}:
            raise JobFailure("invalid_request", "chat takes one positional argument, the request, and nothing by name.")
    raise JobFailure("invalid_request", "The job's body is not an arq job: it has no function name.")
