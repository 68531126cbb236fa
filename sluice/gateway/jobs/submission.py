"""Queues the jobs of a request for its caller, once a worker serves their model."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from typing import Any

from sluice.client import Client
from sluice.contract import keys
from sluice.errors import NoWorker
from sluice.gateway.caller import Caller
from sluice.gateway.disconnect import error_of, until_ended
from sluice.gateway.errors import ApiError, from_client, was_refused
from sluice.gateway.jobs.jobs import AnswerJobs, Jobs
from sluice.gateway.keys.limits import estimate
from sluice.gateway.models import model_missing, model_not_found, requested_model, served_name
from sluice.gateway.settings import ServeSettings
from sluice.gateway.workers import POLL_S, ServedModels, no_worker
from sluice.http_errors import ErrorForm
from sluice.submission import ExtraKey, NewJob, Submitted, lane_of

_Sent = dict[str, asyncio.Task[Submitted]]  # submissions by the id of the job


class JobSubmission:
    """Submits jobs."""

    def __init__(self, client: Client, workers: ServedModels, settings: ServeSettings, jobs: Jobs) -> None:
        self._client, self._workers = client, workers
        self._settings, self._jobs = settings, jobs

    async def submit(
        self,
        caller: Caller,
        bodies: Mapping[str, Mapping[str, Any]],
        answer: AnswerJobs,
        *,
        function: keys.JobFunction = "chat",
        extra_keys: Sequence[ExtraKey] = (),
    ) -> Sequence[Submitted]:
        """Queue a chat completion or a token count for each id, once a worker serves their model, and return the
        outcomes. After that the caller holds nothing of the body. Raises `ApiError` and `SluiceError`. The caller gets
        back the tokens that were reserved for the jobs that were refused.

        `bodies` are the choices of one request of the contract. Those of a detached answer continue when the client
        leaves, unless their bodies decide. The gateway decides their `model`, and their `tenant` if the caller has one.
        An id that exists is not queued again. `extra_keys` are set with each job that is queued, and not without it.

        If some jobs are refused, or the client leaves meanwhile, those that were queued are cancelled: nobody knows
        their ids. They continue if the client finds them by its `Idempotency-Key` or their bodies say so.
        """
        body = next(iter(bodies.values()))
        requested = requested_model(body)
        try:
            model = served_name(caller, requested, self._settings.model_map)
        except ApiError:
            if body.get("model") is not None:
                raise
            raise model_missing(await self._usable(caller)) from None
        lane = lane_of(body)
        if lane not in caller.lanes:
            raise ApiError(ErrorForm.LANE_NOT_ALLOWED, f"service_tier: this key may not use the lane {lane}.")
        own = {"model": model} | ({"tenant": caller.tenant} if caller.tenant is not None else {})
        if body.get("on_disconnect") is None:
            own["on_disconnect"] = "continue" if answer.detached else "cancel"
        requests = {job_id: {**each, **own} for job_id, each in bodies.items()}
        jobs = [NewJob(job_id, each, model, lane, function, extra_keys) for job_id, each in requests.items()]
        is_counted = function == "chat" and caller.meter is not None
        await caller.reserve(list(bodies), estimate(body) if is_counted else 0)
        with ExitStack() as stack:
            sent = self._send(jobs, wait_worker_s=0.0)
            if not answer.has_key and body.get("on_disconnect") != "continue":
                stack.callback(self._abandon_queued, sent)
            submitted = await self._complete(caller, body, jobs, sent)
            stack.pop_all()
        caller.held.release()
        return submitted

    async def _complete(
        self, caller: Caller, body: Mapping[str, Any], jobs: Sequence[NewJob], sent: _Sent
    ) -> Sequence[Submitted]:
        """Wait until the submissions have ended, also if the client leaves: only what is queued can be cancelled. Those
        without a worker are sent again when there is one. Returns the outcomes, or raises the first error."""
        try:
            await until_ended(sent.values())
            if unserved := [job for job in jobs if isinstance(error_of(sent[job.id]), NoWorker)]:
                await self._wait_for_worker(caller, body, unserved[0].model)
                sent.update(self._send(unserved))
                await until_ended(sent.values())
        finally:
            if refused := [id for id, task in sent.items() if was_refused(error_of(task))]:
                await caller.release(refused)
        submitted = [task.result() for task in sent.values()]
        if any(each.served for each in submitted):
            self._workers.note(jobs[0].model)
        return submitted

    def _send(self, jobs: Iterable[NewJob], wait_worker_s: float | None = None) -> _Sent:
        """Submit jobs; one that exists already needs no worker."""
        return {
            job.id: asyncio.create_task(
                self._client.submit(
                    job.request,
                    model=job.model,
                    lane=job.lane,
                    id=job.id,
                    wait_worker_s=wait_worker_s,
                    function=job.function,
                    extra_keys=job.extra_keys,
                )
            )
            for job in jobs
        }

    def _abandon_queued(self, sent: _Sent) -> None:
        """Cancel the jobs that were not certainly refused."""
        queued = [id for id, task in sent.items() if not was_refused(error_of(task))]
        if queued:
            self._jobs.abandon(queued)

    async def _wait_for_worker(self, caller: Caller, body: Mapping[str, Any], model: str) -> None:
        """Wait until a worker serves the model. Raises `ApiError` if there is no such model, or no worker in time."""
        until = time.monotonic() + self._settings.no_worker_s
        await self._check_exists(caller, body, model)
        while not await self._workers.is_served(model):
            if time.monotonic() >= until:
                raise no_worker(requested_model(body))
            await asyncio.sleep(POLL_S)
            await self._check_exists(caller, body, model)  # a worker of another model may have started

    async def _check_exists(self, caller: Caller, body: Mapping[str, Any], model: str) -> None:
        """Raise `ApiError` if other models are served and this one is not known."""
        if await self._workers.exists(model):
            return
        usable = await self._usable(caller)
        if body.get("model") is None:
            raise model_missing(usable)
        requested = requested_model(body)
        raise from_client(NoWorker(requested, list(usable))) if usable else model_not_found(requested)

    async def _usable(self, caller: Caller) -> Set[str]:
        """Return the models with a live worker that the caller may use."""
        served = {worker.get("model", "") for worker in await self._workers.live()}
        return served if caller.models is None else served & caller.models
