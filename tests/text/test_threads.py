import asyncio
import threading
from collections.abc import Callable

import pytest

from schemas.keys import Lane
from worker.errors import Refusal
from worker.text.threads import LARGE, Abandoned, Check, Pool, TextThreads, never

SOON_S = 5.0


class Blocked:
    """Work that goes on until it is let go, or abandoned."""

    def __init__(self) -> None:
        self.began, self.go, self.abandoned = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, check: Check) -> str:
        self.began.set()
        try:
            while not self.go.wait(0.005):
                check()
        except Abandoned:
            self.abandoned.set()
            raise
        return threading.current_thread().name


async def until(event: threading.Event) -> None:
    async with asyncio.timeout(SOON_S):
        while not event.is_set():
            await asyncio.sleep(0.001)


def noting(order: list[str], name: str) -> Callable[[Check], None]:
    return lambda check: order.append(name)


async def test_short_work_does_not_wait_for_large_work_of_any_lane() -> None:
    threads = TextThreads()
    works: list[tuple[Lane, Blocked]] = [(lane, Blocked()) for lane in ("interactive", "batch") for _ in range(3)]
    running = [asyncio.ensure_future(threads.run(lane, LARGE + 1, work)) for lane, work in works]
    await until(works[0][1].began)
    assert await asyncio.wait_for(threads.run("batch", LARGE, lambda check: "done"), SOON_S) == "done"
    for _, work in works:
        work.go.set()
    assert len(set(await asyncio.gather(*running))) == 2


async def test_large_work_runs_one_at_a_time() -> None:
    threads, works = TextThreads(), [Blocked(), Blocked()]
    running = [asyncio.ensure_future(threads.run("interactive", LARGE + 1, work)) for work in works]
    await until(works[0].began)
    await asyncio.sleep(0.05)
    assert not works[1].began.is_set()
    works[0].go.set()
    works[1].go.set()
    await asyncio.gather(*running)


async def test_large_offline_work_holds_up_no_large_interactive_work() -> None:
    threads, offline = TextThreads(), Blocked()
    running = asyncio.ensure_future(threads.run("batch", LARGE + 1, offline))
    await until(offline.began)
    assert await asyncio.wait_for(threads.run("interactive", LARGE + 1, lambda check: "done"), SOON_S) == "done"
    offline.go.set()
    await running


async def test_interactive_work_comes_before_offline_work_that_waited_longer() -> None:
    pool, first, order = Pool("test", 1), Blocked(), list[str]()
    running = [asyncio.ensure_future(pool.run("batch", first))]
    await until(first.began)
    for lane, name in (("batch", "offline"), ("interactive", "one"), ("interactive", "two")):
        running.append(asyncio.ensure_future(pool.run(lane, noting(order, name))))  # type: ignore[arg-type]
        await asyncio.sleep(0)
    first.go.set()
    await asyncio.gather(*running)
    assert order == ["one", "two", "offline"]


async def test_a_cancelled_job_s_work_stops_at_its_next_check() -> None:
    pool, work = Pool("test", 1), Blocked()
    running = asyncio.ensure_future(pool.run("interactive", work))
    await until(work.began)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(work.abandoned)
    assert await asyncio.wait_for(pool.run("interactive", lambda check: "next"), SOON_S) == "next"


async def test_a_thread_in_native_code_is_given_to_nobody_though_its_job_has_gone() -> None:
    pool, native, begun, order = Pool("test", 1), threading.Event(), threading.Event(), list[str]()

    def work(check: Check) -> None:
        begun.set()
        native.wait()

    running = asyncio.ensure_future(pool.run("interactive", work))
    await until(begun)
    running.cancel()
    later = asyncio.ensure_future(pool.run("interactive", noting(order, "later")))
    await asyncio.sleep(0.05)
    assert order == []
    native.set()
    await asyncio.wait_for(later, SOON_S)


async def test_a_job_that_goes_while_it_waits_takes_no_turn_with_it() -> None:
    pool, first, order = Pool("test", 1), Blocked(), list[str]()
    running = asyncio.ensure_future(pool.run("interactive", first))
    await until(first.began)
    gone, stays = [asyncio.ensure_future(pool.run("interactive", noting(order, name))) for name in ("gone", "stays")]
    await asyncio.sleep(0)
    first.go.set()
    gone.cancel()
    await asyncio.gather(running, stays)
    assert order == ["stays"]
    await asyncio.wait_for(pool.run("batch", never_called), SOON_S)


async def test_a_job_that_goes_in_the_moment_of_its_turn_passes_it_on() -> None:
    pool, first, order = Pool("test", 1), Blocked(), list[str]()
    running = asyncio.ensure_future(pool.run("interactive", first))
    await until(first.began)
    gone, stays = [asyncio.ensure_future(pool.run("interactive", noting(order, name))) for name in ("gone", "stays")]
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(pool._pass_on)  # as when the thread is free
    asyncio.get_running_loop().call_soon(gone.cancel)
    await asyncio.wait_for(asyncio.shield(asyncio.gather(gone, return_exceptions=True)), SOON_S)
    first.go.set()
    await asyncio.wait_for(asyncio.gather(running, stays), SOON_S)
    assert order == ["stays"]


async def test_work_beyond_the_time_limit_is_refused_and_its_thread_stops() -> None:
    pool, work = Pool("test", 1, longest_s=0.05), Blocked()
    with pytest.raises(Refusal) as refused:
        await pool.run("interactive", work)
    assert (refused.value.type, refused.value.message.split(":")[0]) == ("too_large", "messages")
    await until(work.abandoned)


async def test_what_the_work_raises_is_raised() -> None:
    def late(check: Check) -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await Pool("test", 1).run("interactive", late)


def never_called(check: Check) -> None:
    never()
