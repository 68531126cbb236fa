"""The functions that a job can name, as arq registers them, and the bodies that name them: arq's `{t, f, a, k, et}`, as
JSON, with one argument."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from arq.worker import Function

from sluice.contract import keys
from worker.bounded_json.reader import BodyReader
from worker.errors import JobFailure
from worker.queue.job.claims import Claim
from worker.queue.job.job import Job, JobResult


class JobFunctions:
    """The functions of a worker, the context that they share, and the reader of the bodies that name them."""

    def __init__(self, functions: Sequence[Function], ctx: dict[Any, Any], reader: BodyReader | None = None) -> None:
        """`ctx`: their first argument, as arq passes it. Each call gets a copy, with the running `Job` as its "job"."""
        self._ctx = ctx
        self._by_name = {function.name: function for function in functions}
        self._reader = reader or BodyReader()

    async def open(self, claim: Claim, body: bytes, max_bytes: int) -> Callable[[Job], Awaitable[JobResult]]:
        """Return the call that a body asks for, which is made by passing it the job. Nothing in the body is executed.
        Raises `JobFailure`."""
        if not keys.is_job_id(claim.job_id):
            raise JobFailure("invalid_request", f"A job id must match {keys.JOB_ID}.")
        if claim.body_bytes > max_bytes:
            raise JobFailure("too_large", f"The job is {claim.body_bytes:,} bytes; this worker accepts {max_bytes:,}.")
        if not body:
            raise JobFailure(
                "invalid_request", "The job's body has expired or was deleted; submit it again.", retryable=True
            )
        name, request = _named(await self._reader.parse(body, claim.lane, claim.tenant))
        function = self._function(name)

        async def call(job: Job) -> JobResult:
            answer = await function.coroutine({**self._ctx, "job": job}, request)
            assert isinstance(answer, JobResult), f"{function.name} must return a JobResult"
            return answer

        return call

    def _function(self, name: str) -> Function:
        if name not in self._by_name:
            known = ", ".join(sorted(self._by_name))
            raise JobFailure("invalid_request", f"The function {name[:64]!r} does not exist; this worker has: {known}.")
        return self._by_name[name]


def _named(envelope: Any) -> tuple[str, Any]:
    """Return the function's name and its argument. Raises `JobFailure`."""
    match envelope:
        case {"f": str(name), "a": [request], "k": {**kwargs}} if not kwargs:
            return name, request
        case {"f": str(name)}:
            raise JobFailure(
                "invalid_request", f"{name[:64]} takes one positional argument, the request, and nothing by name."
            )
    raise JobFailure("invalid_request", "The job's body is not an arq job: it has no function name.")
