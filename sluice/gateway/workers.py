"""The live workers and the names of their models, as a gateway reads them at most once a second."""

import asyncio
import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from sluice.client import Client
from sluice.contract import keys
from sluice.contract.keys import DEFAULT_MODEL, MODEL_NAME
from sluice.contract.models import Model
from sluice.errors import SluiceError, describe_served
from sluice.gateway.caller import Caller
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError
from sluice.openai import WORKER_RETRY_S
from sluice.presence import mapped_name, serves
from sluice.transport import Interruption

logger = logging.getLogger("sluice.gateway")

_FRESH_S = 1.0  # a worker's presence lasts for a lease of seconds
POLL_S = 0.25  # between two checks for a worker, at least
_SEEN_KEY = "sluice:serve:models"  # sorted set: models that had a worker, by Unix seconds
# Of a worker that takes jobs: queue limit, rate, and until when it holds, in Unix seconds. Any client can write it, so
# digits are bounded.
_REPORT = re.compile(rb"\d+ [\d.]+ (\d{1,15})\b")

Worker = Mapping[str, str]  # the fields that a worker publishes
_Reading = tuple[list[dict[str, str]], dict[str, str], dict[str, dict[str, Model]]]


class ServedModels:
    """Answers which models are served, for any number of requests at once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._served: dict[str, float] = {}  # models with a live worker, by when that was read
        self._noted: dict[str, float] = {}
        self._recording = set[asyncio.Task[None]]()
        self._live: Sequence[Worker] = ()
        self._aliases: Mapping[str, str] = {}
        self._supervised: Mapping[str, Model] = {}
        self._read_at = float("-inf")
        self._reading: asyncio.Task[_Reading] | None = None

    async def is_served(self, model: str) -> bool:
        """Return True if a live worker serves the model, or the one that this alias stands for."""
        now = time.monotonic()
        if now - self._served.get(model, float("-inf")) < _FRESH_S:
            return True
        at = self._client.of_model(model)
        if not await at.retries.run(lambda: self._has_report(at.redis, model)):
            self._served.pop(model, None)
            target = (await self.aliases()).get(model)
            return target is not None and await at.retries.run(lambda: self._has_report(at.redis, target))
        self._served[model] = now
        self.note(model)
        return True

    async def _has_report(self, redis: Redis, model: str) -> bool:
        """Return True if a worker of the model says that it takes jobs, and its lease has not expired."""
        try:
            async with redis.pipeline(transaction=False) as pipe:
                pipe.hvals(keys.model(model))
                pipe.time()
                reports, (seconds, _) = await pipe.execute()
        except ResponseError:
            return True  # a foreign value, which the next submission deletes
        return any(int(found[1]) > seconds for report in reports if (found := _REPORT.match(report)))

    def note(self, model: str) -> None:
        """Record for all gateways that the model is served. No request waits for it, or fails with it."""
        now = time.monotonic()
        if now - self._noted.get(model, float("-inf")) >= 60.0:  # seconds between two notes of a model
            self._noted[model] = now
            task = asyncio.create_task(self._record(model))
            self._recording.add(task)
            task.add_done_callback(self._recording.discard)

    async def _record(self, model: str) -> None:
        at = self._client.of_model(model)

        async def send() -> None:
            async with at.redis.pipeline(transaction=False) as pipe:
                pipe.zadd(_SEEN_KEY, {model: time.time()})
                pipe.zremrangebyscore(_SEEN_KEY, "-inf", _day_ago())
                await pipe.execute()

        try:
            await at.retries.run(send)
        except (SluiceError, RedisError) as error:
            self._noted.pop(model, None)  # the next request tries again
            logger.warning("the model %s: other gateways were not told that it is served: %s", model, error)

    async def exists(self, model: str) -> bool:
        """Return False if other models are served and this one was not within the last day. An alias exists, and what a
        supervisor loads for a job."""
        served = {worker.get("model") for worker in await self.live()} | {*await self.supervised()}
        if not served or model in served or model in await self.aliases():
            return True
        at = self._client.of_model(model)
        seen: float | None = await at.retries.run(lambda: at.redis.zscore(_SEEN_KEY, model))
        return seen is not None and seen > _day_ago()

    async def live(self) -> Sequence[Worker]:
        """Return the fields of each live worker that takes jobs. Callers share one reading."""
        await self._refresh()
        return self._live

    async def aliases(self) -> Mapping[str, str]:
        """Return the model that each alias stands for, without those that live workers serve as a model. Callers share
        one reading."""
        await self._refresh()
        return self._aliases

    async def _refresh(self) -> None:
        if time.monotonic() - self._read_at < _FRESH_S:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        workers, aliases, supervised = await asyncio.shield(self._reading)
        self._live = [worker for worker in workers if serves(worker)]
        found = [pair for models in supervised.values() for pair in models.items()]
        self._supervised = dict(
            sorted(found, key=lambda pair: pair[1]["state"] == "loaded")
        )  # of several, a loaded one
        served = {worker.get("model") for worker in self._live} | {*self._supervised}
        self._aliases = {alias: model for alias, model in aliases.items() if alias not in served}
        self._read_at = time.monotonic()

    async def supervised(self) -> Mapping[str, Model]:
        """Return the models that supervisors load when a job comes, by name. Callers share one reading."""
        await self._refresh()
        return self._supervised

    async def _read(self) -> _Reading:
        client = self._client
        return await client.workers(), await client.aliases(), await client.supervised_models()


def _day_ago() -> float:
    """Return the Unix time since when the workers of a model are expected back."""
    return time.time() - 86_400


def worker_gone(model: str) -> ApiError:
    """Return the error for a model whose workers have gone."""
    message = f"No worker serves the model {model[:80]!r} at the moment."
    return ApiError(ErrorForm.OVERLOADED, message, retry_after_s=WORKER_RETRY_S)


class QueueWatch:
    """Checks waiting jobs. A job that starts before its first check costs a timer alone."""

    def __init__(self, client: Client, workers: ServedModels, no_worker_s: float) -> None:
        self._client, self._workers = client, workers
        self._no_worker_s = no_worker_s
        self._every_s = max(POLL_S, no_worker_s / 4)

    @contextmanager
    def watching(self, job_id: str) -> Iterator[None]:
        """Interrupt the block with `ApiError` 503, and cancel the job, if it waits in its queue and its model has been
        without a worker for `no_worker_s` seconds. Also raises the errors of that cancellation."""
        with Interruption() as block, ExitStack() as stack:

            def begin() -> None:
                stack.callback(asyncio.create_task(self._watch(job_id, block)).cancel)

            stack.callback(asyncio.get_running_loop().call_later(self._every_s, begin).cancel)
            yield

    async def _watch(self, job_id: str, block: Interruption) -> None:
        absent_since = float("inf")
        while True:
            model = await self._unserved_model(job_id)
            absent_since = min(absent_since, time.monotonic()) if model else float("inf")
            if model and time.monotonic() - absent_since >= self._no_worker_s:
                return block.interrupt(await self._cancel(job_id, model))
            await asyncio.sleep(self._every_s)

    async def _unserved_model(self, job_id: str) -> str | None:
        """Return the model of a job that waits for a worker that does not exist, else None."""
        try:
            model = await self._client.waits_for(job_id)
            return model if model and not await self._workers.is_served(model) else None
        except (SluiceError, RedisError):
            return None  # an outage or a refusal, which the block itself meets

    async def _cancel(self, job_id: str, model: str) -> Exception:
        """Cancel the job, and return the error for its client."""
        try:
            await self._client.cancel(job_id)
        except (SluiceError, RedisError) as error:
            return error
        return worker_gone(model)


def served_name(caller: Caller, requested: str, mapped: Mapping[str, str]) -> str:
    """Return the name that workers serve the requested model under. Raises `ApiError` 404 for a name that the caller
    may not use or that no worker can have."""
    served = mapped_name(requested, mapped)
    is_allowed = caller.models is None or bool({requested, served} & caller.models)
    if not is_allowed or not re.fullmatch(MODEL_NAME, served):
        raise model_not_found(requested)
    return served


def model_missing(served: Collection[str]) -> ApiError:
    """Return the error for a request without a model, if no worker has the name that it then stands for."""
    problem = f"it is missing, and no model is called {DEFAULT_MODEL!r}; {describe_served(served)}."
    return ApiError(ErrorForm.MISSING_PARAMETER, f"model: {problem}", param="model")


def model_not_found(model: str) -> ApiError:
    """Return the error for a model that does not exist, as far as the caller may know."""
    return ApiError(ErrorForm.MODEL_NOT_FOUND, f"The model {model[:80]!r} does not exist.", param="model")
