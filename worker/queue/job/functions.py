"""The functions that a job can name, as arq registers them."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from arq.worker import Function

from worker.bounded_json.reader import Reader
from worker.queue.job.claims import Claim
from worker.queue.job.envelope import open_envelope
from worker.queue.job.job import Job, JobResult


class JobFunctions:
    """The functions of a worker, the context that they share, and the reader of the bodies that name them."""

    def __init__(self, functions: Sequence[Function], ctx: dict[Any, Any], reader: Reader | None = None) -> None:
        """`ctx`: arq's context. Each call gets a copy, with the running `Job` as its "job"."""
        self.all = tuple(functions)
        self.ctx = ctx
        self._by_name = {function.name: function for function in functions}
        self._reader = reader or Reader()

    async def open(self, claim: Claim, body: bytes, max_bytes: int) -> Callable[[Job], Awaitable[JobResult]]:
        """Return the call that a body asks for, which is made by passing it the job. Raises `JobFailure`."""
        function, request = await open_envelope(claim, body, self._reader, self._by_name, max_bytes)

        async def call(job: Job) -> JobResult:
            answer = await function.coroutine({**self.ctx, "job": job}, request)
            assert isinstance(answer, JobResult), f"{function.name} must return a JobResult"
            return answer

        return call
