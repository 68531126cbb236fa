import asyncio
import time

from redis.asyncio import Redis

from worker.queue.redis_server import ServerClock

SLOW_S = 0.2


class SlowAnswers:
    """A server whose answers arrive late, as they do at a client that is busy."""

    def __init__(self, db: Redis, ahead_s: float = 0.0) -> None:
        self._db, self._ahead_s = db, ahead_s

    async def time(self) -> tuple[int, int]:
        seconds, microseconds = await self._db.time()
        await asyncio.sleep(SLOW_S)
        return int(seconds + self._ahead_s), microseconds


async def ahead_s(clock: ServerClock, db: Redis) -> float:
    """Return how far the clock is ahead of the server's time, to within the time of a call."""
    seconds, microseconds = await db.time()
    return clock.now() - (seconds + microseconds / 1e6)


async def test_the_clock_of_the_server_is_followed_in_both_directions(db: Redis) -> None:
    clock = ServerClock()
    for hours in (1, -1):
        began = time.monotonic()
        await clock.sync(SlowAnswers(db, ahead_s=3600 * hours))  # type: ignore[arg-type]
        ahead = await ahead_s(clock, db)
        assert abs(ahead - 3600 * hours) < time.monotonic() - began + 0.01


async def test_a_slow_answer_does_not_move_a_clock_that_agrees_with_it(db: Redis) -> None:
    clock = ServerClock()
    await clock.sync(db)
    before = clock.now() - time.time()
    for _ in range(2):
        await clock.sync(SlowAnswers(db))  # type: ignore[arg-type]
    # A busy machine may do something else between two looks at the clocks.
    assert min(abs(clock.now() - time.time() - before) for _ in range(20)) < SLOW_S / 10
