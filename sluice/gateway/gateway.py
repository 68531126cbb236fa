"""What all surfaces share: callers, models, and jobs."""

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from redis.asyncio import Redis
from starlette.requests import Request

from sluice.cancellation import Outcome
from sluice.client import Client
from sluice.gateway.caller import LOCAL, Caller
from sluice.gateway.errors import ApiError
from sluice.gateway.models import requested_model, served_name
from sluice.gateway.settings import ServeSettings
from sluice.submission import Submitted, lane_of
from sluice.wire import Event

_UNKNOWN_S = 2.0  # short, since a job exists as soon as it is submitted


class Gateway:
    """Connects the surfaces with the queue."""

    def __init__(self, client: Client, settings: ServeSettings) -> None:
        self.client = client
        self.settings = settings

    @property
    def redis(self) -> Redis:
        """The server, for keys of the front's own, which begin with `sluice:serve:`."""
        return self.client.redis

    async def authenticate(self, request: Request) -> Caller:
        """Return the caller of a request. Raises `ApiError`."""
        return LOCAL

    async def submit(
        self, caller: Caller, body: Mapping[str, Any], *, job_id: str | None = None, on_disconnect: str = "cancel"
    ) -> Submitted:
        """Queue a chat completion for the caller, once a worker serves its model. Raises `ApiError`, `SluiceError`.

        `body` is a request of the contract; the front decides `model`, `tenant` and `on_disconnect`.
        """
        model = served_name(caller, requested_model(body), self.settings.model_map)
        lane = lane_of(body)
        if lane not in caller.lanes:
            raise ApiError(403, f"service_tier: this key may not use the lane {lane}.", code="lane_not_allowed")
        tenant = {} if caller.tenant is None else {"tenant": caller.tenant}
        request = {**body, **tenant, "model": model, "on_disconnect": on_disconnect}
        wait_s = self.settings.no_worker_s
        return await self.client.submit(request, model=model, lane=lane, id=job_id, wait_worker_s=wait_s)

    def events(self, job_id: str, after: int = -1) -> AsyncGenerator[Event]:
        """Yield the job's events after `after`, as `Client.stream` does."""
        return self.client.stream(job_id, after=after, unknown_s=_UNKNOWN_S)

    async def result(self, job_id: str) -> dict[str, Any]:
        """Return the job's `chat.completion`, waiting until it has ended. Raises as `Client.result` does."""
        return await self.client.result(job_id)

    async def cancel(self, job_id: str) -> Outcome:
        """Cancel a job."""
        return await self.client.cancel(job_id)

    async def check_owner(self, caller: Caller, job_id: str) -> None:
        """Check that the job is the caller's. Raises `ApiError` 404 for another's, as for a job that does not exist."""
        if caller.tenant is not None and await self.client.tenant(job_id) != caller.tenant:
            raise ApiError(404, f"There is no job {json.dumps(job_id)}, or it has expired.", code="not_found")
