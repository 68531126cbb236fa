"""Endpoints and deliveries as one server has them: see the scripts in `lua`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from redis.asyncio import Redis

from sluice.contract import keys, scripts
from sluice.transport import Retries
from sluice.webhooks.endpoint import Delivery, Endpoint

_SCRIPTS = ("endpoint", "take", "settle", "retry")


@dataclass(frozen=True, slots=True)
class Taken:
    """A delivery that this process attempts under a lease."""

    endpoint: Endpoint
    delivery: Delivery
    lease: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Deliveries of one endpoint, or of several."""

    waiting: int = 0
    dead: int = 0  # letters that are kept
    dropped: int = 0  # because too many waited
    delivered: int = 0
    failed: int = 0  # attempts that are followed by another
    oldest_ms: int | None = None  # since when the oldest one waits, in Unix milliseconds
    last: str = ""  # outcome of the last attempt

    def __add__(self, other: "Counts") -> "Counts":
        oldest = [each for each in (self.oldest_ms, other.oldest_ms) if each is not None]
        return Counts(
            self.waiting + other.waiting,
            self.dead + other.dead,
            self.dropped + other.dropped,
            self.delivered + other.delivered,
            self.failed + other.failed,
            min(oldest, default=None),
            self.last or other.last,
        )


class WebhookStore:
    """Reads and writes the endpoints and deliveries of one server. Raises redis-py's errors."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries
        self._scripts = {
            name: redis.register_script(
                "\n".join((scripts.read_lua("sluice.contract", "job_log"), scripts.read_lua(__package__, name)))
            )
            for name in _SCRIPTS
        }

    async def _run(self, name: str, *args: str | bytes | int) -> Any:
        return await self._retries.run(partial(self._scripts[name], args=list(args)))

    async def endpoints(self) -> list[Endpoint]:
        """Return all endpoints, oldest first."""
        stored: dict[bytes, bytes] = await self._retries.run(lambda: self._redis.hgetall(keys.WEBHOOKS))
        found = filter(None, map(Endpoint.from_json, stored.values()))
        return sorted(found, key=lambda each: (each.created_at, each.id))

    async def add(self, endpoint: Endpoint) -> None:
        """Store a new endpoint. Raises ValueError if there are a hundred."""
        if await self._run("endpoint", endpoint.id, "", endpoint.to_json()) == -1:
            raise ValueError("there are a hundred endpoints already; remove one first")

    async def change(self, id: str, change: Callable[[Endpoint], Endpoint | None]) -> Endpoint | None:
        """Store what `change` makes of an endpoint, also of one that another client changes meanwhile; with None delete
        the endpoint and what waits for it. Returns the endpoint as it was before, None if there is none of this id."""
        while True:
            raw: bytes | None = await self._retries.run(lambda: self._redis.hget(keys.WEBHOOKS, id))
            if raw is None or (old := Endpoint.from_json(raw)) is None:
                return None
            new = change(old)
            if await self._run("endpoint", id, raw, new.to_json() if new else "") == 1:
                return old

    async def take(
        self, now_ms: int | None, *, lease_ms: int, limit: int, under_way: Mapping[str, int]
    ) -> tuple[int, bool, list[Taken]]:
        """Take the deliveries that are due, at most `limit` of an endpoint together with those `under_way` here.
        Returns the time in Unix milliseconds, which is the server's if `now_ms` is None, and True if events still wait
        for their deliveries to be made."""
        numbers = [part for pair in under_way.items() for part in pair]
        now, more, *parts = await self._run("take", "" if now_ms is None else now_ms, lease_ms, limit, *numbers)
        found = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        parsed = [(Endpoint.from_json(one), Delivery.from_json(two), lease.decode()) for one, two, lease in found]
        taken = [Taken(endpoint, delivery, lease) for endpoint, delivery, lease in parsed if endpoint and delivery]
        return int(now), bool(more), taken

    async def settle(
        self, taken: Taken, outcome: str, after: Delivery, *, next_ms: int = 0, paused_until_ms: int = 0
    ) -> None:
        """Note the outcome of an attempt: `delivered`, `failed` or `dead`. `after`: the delivery with that attempt;
        `next_ms`: when the next one is due; `paused_until_ms`: until then the endpoint gets nothing; 0: no matter."""
        stored = "" if outcome == "delivered" else after.to_json()
        last = after.problem or outcome
        names = (taken.endpoint.id, after.id, taken.lease, outcome, stored, next_ms, paused_until_ms, last)
        await self._run("settle", *names)

    async def counts(self, endpoint_id: str) -> Counts:
        """Return what waits for an endpoint, and what has become of its deliveries."""

        async def read() -> list[Any]:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.zcard(_key("due", endpoint_id))
                pipe.llen(_key("dead", endpoint_id))
                pipe.zrange(_key("since", endpoint_id), 0, 0, withscores=True)
                pipe.hgetall(_key("counts", endpoint_id))
                return await pipe.execute()

        waiting, dead, oldest, counted = await self._retries.run(read)
        numbers = {name: int(counted.get(name.encode(), 0)) for name in ("dropped", "delivered", "failed")}
        since = int(oldest[0][1]) if oldest else None
        return Counts(waiting, dead, **numbers, oldest_ms=since, last=counted.get(b"last", b"").decode())

    async def dropped(self) -> int:
        """Return the number of events that were dropped because too many waited for a deliverer."""
        dropped = await self._retries.run(lambda: self._redis.hvals(f"{keys.WEBHOOKS}:dropped"))
        return sum(map(int, dropped))

    async def total(self) -> Counts:
        """Return the counts of all endpoints together, with the events that were dropped before they had deliveries."""
        counts = [await self.counts(endpoint.id) for endpoint in await self.endpoints()]
        return sum(counts, Counts(dropped=await self.dropped()))

    async def waiting(self, endpoint_id: str) -> list[tuple[Delivery, int]]:
        """Return the deliveries that wait, oldest first, and when each is due, in Unix milliseconds."""

        async def read() -> list[Any]:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.hgetall(_key("waiting", endpoint_id))
                pipe.zrange(_key("due", endpoint_id), 0, -1, withscores=True)
                return await pipe.execute()

        stored, due = await self._retries.run(read)
        parsed = [(Delivery.from_json(stored[id]), int(at)) for id, at in due if id in stored]
        found = [(delivery, at) for delivery, at in parsed if delivery]
        return sorted(found, key=lambda each: each[0].since_ms)

    async def dead(self, endpoint_id: str) -> list[Delivery]:
        """Return the dead letters, oldest first."""
        return [*filter(None, map(Delivery.from_json, await self._dead(endpoint_id)))]

    async def retry(self, endpoint_id: str, event_id: str | None, now_ms: int) -> int:
        """Let dead letters be delivered again, that of an event or all, and return their number."""
        retried = 0
        for raw in await self._dead(endpoint_id):
            letter = Delivery.from_json(raw)
            if letter and event_id in (None, letter.id):
                again = replace(letter, attempts=0, since_ms=now_ms).to_json()
                retried += await self._run("retry", endpoint_id, letter.id, raw, again, now_ms)
        return retried

    async def _dead(self, endpoint_id: str) -> Sequence[bytes]:
        found: list[bytes] = await self._retries.run(lambda: self._redis.lrange(_key("dead", endpoint_id), 0, -1))
        return found

    async def now_ms(self) -> int:
        """Return the server's time in Unix milliseconds."""
        seconds, microseconds = await self._retries.run(self._redis.time)
        return int(seconds) * 1000 + int(microseconds) // 1000


def _key(part: str, endpoint_id: str) -> str:
    return f"{keys.WEBHOOKS}:{part}:{endpoint_id}"
