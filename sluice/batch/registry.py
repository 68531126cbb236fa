"""The runs and the jobs of their lines, as stored in Redis: status, published changes, requested cancellations."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from sluice.cancellation import Cancellation
from sluice.contract import keys
from sluice.contract.batch import Batch
from sluice.contract.events import check_of
from sluice.contract.scripts import source
from sluice.errors import QueueFull, ServerFull, UnknownBatch
from sluice.presence import Workers
from sluice.submission import NewJob, Submission, Submitted
from sluice.transport import MAX_CALLS, Retries, raise_outage

T = TypeVar("T")
A = TypeVar("A")

_STATUS_TTL_S = 7 * 86_400  # after the last report on a run


class BatchRegistry:
    """Stores and reads the status of runs. Raises redis-py's errors."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._end = redis.register_script(source("run_end"))

    async def put(self, batch: Batch) -> None:
        """Store the status without publishing it. Webhooks are told of an end once, by this or by `announce`."""
        if batch.ended:
            return await self._store_end(batch, publish=False)
        await self._redis.set(keys.batch(batch.id), batch.to_json(), ex=_STATUS_TTL_S)

    async def touch(self, batch_id: str) -> None:
        """Reset the key's time to live, which shows that a process feeds the run. Works on a full server too."""
        await self._redis.pexpire(keys.batch(batch_id), _STATUS_TTL_S * 1000)

    async def announce(self, batch: Batch) -> None:
        """Store and publish the status."""
        if batch.ended:
            return await self._store_end(batch, publish=True)
        status = batch.to_json()
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(keys.batch(batch.id), status, ex=_STATUS_TTL_S)
            pipe.publish(keys.batch_channel(batch.id), status)
            await pipe.execute()

    async def _store_end(self, batch: Batch, *, publish: bool) -> None:
        names = [keys.batch(batch.id), keys.batch_channel(batch.id), keys.batch_cancel(batch.id)]
        ended_at = getattr(batch, f"{batch.status}_at")
        end = (batch.id, batch.status, ended_at or 0, batch.sluice.tenant or "")
        await self._end(names, [batch.to_json(), _STATUS_TTL_S, int(publish), *end])

    async def withdraw(self, batch: Batch) -> None:
        """Publish the end of a run that queued nothing, and delete its status."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.batch(batch.id), keys.batch_cancel(batch.id))
            pipe.publish(keys.batch_channel(batch.id), batch.to_json())
            await pipe.execute()

    async def announce_late(self, batch: Batch) -> None:
        """Announce the status unless it is already stored. The process that ended the run may have died before that."""
        if await self._redis.get(keys.batch(batch.id)) != batch.to_json().encode():
            await self.announce(batch)

    async def read(self, batch_id: str) -> Batch:
        """Return the status of a run. Raises `UnknownBatch`."""
        found = await self._read(keys.batch(batch_id))
        if found is None:
            raise UnknownBatch(f"there is no offline run {batch_id!r}")
        return found

    async def read_all(self, found: Sequence[bytes]) -> list[Batch]:
        """Return the runs among the given keys, oldest first. Foreign values are skipped."""
        names, runs = [key for key in found if not key.endswith(b":cancel")], list[Batch]()
        for start in range(0, len(names), MAX_CALLS):
            # In a thread: there may be thousands of runs, each with a thousand problems.
            runs += await asyncio.to_thread(_read_all_known, await self._answers(names[start : start + MAX_CALLS]))
        return sorted(runs, key=lambda batch: (batch.created_at, batch.id))

    async def _read(self, name: str) -> Batch | None:
        raw, left_ms = await self._answers([name])
        if isinstance(raw, ResponseError):
            raise raw
        return _read(raw, left_ms)

    async def _answers(self, names: Sequence[str | bytes]) -> list[Any]:
        """Return the value and the remaining life of each key; an error in place of a foreign value."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.get(name)
                pipe.pttl(name)
            answers = await pipe.execute(raise_on_error=False) if names else []
        for denied in (answer for answer in answers if isinstance(answer, NoPermissionError)):
            raise denied
        raise_outage(answers)
        return answers

    async def request_cancel(self, batch_id: str) -> None:
        """Request the cancellation of a run. Its feeder checks for such requests, as does one that resumes it."""
        await self._redis.set(keys.batch_cancel(batch_id), "1", ex=_STATUS_TTL_S)

    async def forget_cancel(self, batch_id: str) -> None:
        """Forget a request that came too late: the run had ended."""
        await self._redis.delete(keys.batch_cancel(batch_id))

    async def cancels_requested_at(self, batch_ids: Sequence[str]) -> dict[str, float]:
        """Return when the cancellation of these runs was requested, of those for which it was."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for batch_id in batch_ids:
                pipe.pttl(keys.batch_cancel(batch_id))
            answers = await pipe.execute() if batch_ids else []
        now = time.time()
        lives = {id: int(left_ms) / 1000 for id, left_ms in zip(batch_ids, answers, strict=True) if left_ms > 0}
        return {id: now - (_STATUS_TTL_S - left_s) for id, left_s in lives.items()}

    async def is_cancel_requested(self, batch_id: str) -> bool:
        """Return True if the cancellation of the run is requested."""
        return bool(await self._redis.exists(keys.batch_cancel(batch_id)))


def _read(raw: bytes | None, left_ms: int) -> Batch | None:
    """Parse a status, and mark it as paused if the key's remaining life shows that its feeder has stopped reporting."""
    if raw is None:
        return None
    batch, silent_s = Batch.from_json(raw), _STATUS_TTL_S - left_ms / 1000
    # A feeder reports every two seconds.
    return batch.paused(time.time() - silent_s) if silent_s > 10.0 else batch


def _read_all_known(flat: Sequence[Any]) -> list[Batch]:
    statuses = (_read_known(raw, left_ms) for raw, left_ms in zip(flat[::2], flat[1::2], strict=True))
    return [*filter(None, statuses)]


def _read_known(raw: Any, left_ms: int) -> Batch | None:
    """Parse a status; None for a value that no feeder wrote."""
    try:
        batch = _read(raw, left_ms) if isinstance(raw, bytes) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return batch if check_of(Batch)(batch) else None


RedisOf = Callable[[str], Redis]  # the server of a model's jobs
TokenLimits = dict[str, tuple[int | None, int | None]]  # by model: its context, and the most tokens of an answer


class JobStores:
    """A `JobStore` for each server on which a run's lines have jobs. Jobs are named by id and model."""

    def __init__(self, redis_of: RedisOf, make: Callable[[Redis], Retries]) -> None:
        """`make`: the retries of a server."""
        self._redis_of, self._make = redis_of, make
        self._stores = dict[Redis, JobStore]()

    def _of(self, model: str) -> "JobStore":
        redis = self._redis_of(model)
        if redis not in self._stores:
            self._stores[redis] = JobStore(redis, self._make(redis))
        return self._stores[redis]

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted | QueueFull | ServerFull]:
        """Queue jobs, and return an outcome for each."""
        return await self._each(jobs, [job.model for job in jobs], lambda store, own: store.submit(own))

    async def read(self, jobs: Sequence[tuple[str, str]]) -> list[tuple[bytes | None, bool]]:
        """Return for each job what `JobStore.read` does."""
        ids, models = [id for id, _ in jobs], [model for _, model in jobs]
        return await self._each(ids, models, lambda store, own: store.read(own))

    async def token_limits(self, models: Iterable[str]) -> TokenLimits:
        """Return the limits of the models that live workers serve on the servers of these models: the lowest of each
        model, so that any worker may take a job."""
        found = TokenLimits()
        for redis in {self._redis_of(model) for model in models}:
            workers = Workers(redis, self._make(redis), waits_out_outages=True)
            for worker in await workers.read_all():
                before = found.get(worker.get("model", ""), (None, None))
                own = (worker.get("context_tokens", ""), worker.get("max_output_tokens", ""))
                context, most = (_lower(*pair) for pair in zip(before, own, strict=True))
                found[worker.get("model", "")] = context, most
            found |= {alias: found[name] for alias, name in (await workers.aliases()).items() if name in found}
        return found

    async def cancel(self, jobs: Sequence[tuple[str, str]]) -> None:
        """Cancel jobs: queued ones at once, running ones through their workers."""
        for model in dict.fromkeys(model for _, model in jobs):
            await self._of(model).cancel([id for id, own in jobs if own == model])

    async def delete(self, jobs: Sequence[tuple[str, str]]) -> None:
        """Delete all keys of these jobs, as `JobStore.delete` does."""
        for model in dict.fromkeys(model for _, model in jobs):
            await self._of(model).delete([job for job in jobs if job[1] == model])

    async def delete_run(self, run_id: str, models: Iterable[str]) -> None:
        """Delete the run's queued or running jobs of these models."""
        for model in models:
            await self._of(model).delete_run(run_id, [model])

    async def _each(
        self, items: Sequence[T], models: Sequence[str], ask: Callable[["JobStore", Sequence[T]], Awaitable[list[A]]]
    ) -> list[A]:
        """Return the answer for each item, of the server of its model; the servers are asked at the same time."""
        places = dict[JobStore, list[int]]()
        for place, model in enumerate(models):
            places.setdefault(self._of(model), []).append(place)
        asked = (ask(store, [items[place] for place in own]) for store, own in places.items())
        answers = dict[int, A]()
        for own, found in zip(places.values(), await asyncio.gather(*asked), strict=True):
            answers |= zip(own, found, strict=True)
        return [answers[place] for place in range(len(items))]


def _lower(limit: int | None, published: str) -> int | None:
    """Return the lower one of a limit and what a worker publishes; an earlier version does not."""
    if not re.fullmatch(r"[1-9][0-9]{0,14}", published):
        return limit
    return int(published) if limit is None else min(limit, int(published))


class JobStore:
    """Submits, reads and deletes jobs; each call waits out outages. No transactions: a full server rejects them."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries
        self._submission, self._cancellation = Submission(redis, retries), Cancellation(redis, retries)

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted | QueueFull | ServerFull]:
        """Queue jobs, and return an outcome for each."""
        answers: list[Submitted | QueueFull | ServerFull] = await self._retries.run_until_answered(
            lambda: self._submission.submit_all(jobs)
        )
        return answers

    async def read(self, ids: Sequence[str]) -> list[tuple[bytes | None, bool]]:
        """Return for each job, in order, its result as the worker wrote it, or None; and True if the server has the
        job's state."""
        found: list[tuple[bytes | None, bool]] = []
        for start in range(0, len(ids), MAX_CALLS):
            found += await self._read(ids[start : start + MAX_CALLS])
        return found

    async def cancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs: queued ones at once, running ones through their workers."""
        await self._cancellation.cancel_all(ids)

    async def delete(self, jobs: Sequence[tuple[str, str]]) -> None:
        """Delete all keys of these jobs (id and model). A queued one will not run; the output of a running one is
        discarded."""

        async def send() -> None:
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id, _ in jobs:
                    pipe.hget(keys.job(job_id), "model")
                stored = await pipe.execute(raise_on_error=False)  # an error for a foreign value
                for (job_id, name), model in zip(jobs, stored, strict=True):
                    queued_for = model.decode() if isinstance(model, bytes) else name  # `name` may be an alias
                    pipe.zrem(keys.queue(queued_for, "batch"), job_id)
                    pipe.unlink(*(name(job_id) for name in _JOB_KEYS))
                await pipe.execute()

        if jobs:
            await self._retries.run_until_answered(send)

    async def delete_run(self, run_id: str, models: Iterable[str]) -> None:
        """Delete the run's queued or running jobs of these models; an alias stood for any model."""
        aliases: dict[bytes, bytes] = await self._retries.run_until_answered(lambda: self._redis.hgetall(keys.ALIASES))
        lanes = await self._retries.scan(keys.QUEUES, waits_out_outages=True) if aliases else ()
        for model in {*models, *(lane[0] for lane in map(keys.parse_queue, lanes) if lane)}:
            queued = await self._queued(f"{run_id}-*", model)
            for start in range(0, len(queued), MAX_CALLS):
                await self.delete([(job_id, model) for job_id in queued[start : start + MAX_CALLS]])

    async def _queued(self, pattern: str, model: str) -> list[str]:
        names, cursor = set[str](), None
        while cursor != 0:
            scan = partial(self._redis.zscan, keys.queue(model, "batch"), cursor or 0, match=pattern, count=1000)
            cursor, found = await self._retries.run_until_answered(scan)
            names.update(member.decode() for member, _ in found)
        return list(names)

    async def _read(self, ids: Sequence[str]) -> list[tuple[bytes | None, bool]]:
        async def send() -> tuple[list[bytes | None], int]:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.mget([keys.result(job_id) for job_id in ids])
                pipe.exists(*(keys.job(job_id) for job_id in ids))
                results, num_known = await pipe.execute()
            return results, num_known

        results, num_known = await self._retries.run_until_answered(send)
        if num_known == len(ids):
            return [(result, True) for result in results]
        return [(result, await self._exists(job_id)) for job_id, result in zip(ids, results, strict=True)]

    async def _exists(self, job_id: str) -> bool:
        return bool(await self._retries.run_until_answered(lambda: self._redis.exists(keys.job(job_id))))


_JOB_KEYS = (keys.body, keys.job, keys.log, keys.result)
