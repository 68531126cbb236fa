import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from sluice.contract.keys import Lane
from worker.errors import JobFailure
from worker.text.threads import LARGE, Check, Pool, TextThreads, WorkAbandoned, never

SOON_S = 20.0


class Blocked:
    """Work that goes on until it is let go, or abandoned."""

    def __init__(self) -> None:
        self.began, self.go, self.abandoned = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, check: Check) -> str:
        self.began.set()
        try:
            while not self.go.wait(0.005):
                check()
        except WorkAbandoned:
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
    names = await asyncio.gather(*running)
    assert {name.rpartition("_")[0] for name in names} == {"large-text-interactive", "large-text-batch"}


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
    asyncio.get_running_loop().call_soon(pool._turns.give_back)  # as when the thread is free
    asyncio.get_running_loop().call_soon(gone.cancel)
    await asyncio.wait_for(asyncio.shield(asyncio.gather(gone, return_exceptions=True)), SOON_S)
    first.go.set()
    await asyncio.wait_for(asyncio.gather(running, stays), SOON_S)
    assert order == ["stays"]


async def test_work_beyond_the_time_limit_is_refused_and_its_thread_stops() -> None:
    pool, work = Pool("test", 1, timeout_s=0.05), Blocked()
    with pytest.raises(JobFailure) as refused:
        await pool.run("interactive", work)
    assert (refused.value.type, refused.value.message.split(":")[0]) == ("too_large", "messages")
    await until(work.abandoned)


class Long:
    """Work of many steps, that calls its check between them until it is let go."""

    def __init__(self, order: list[str], name: str) -> None:
        self.began, self.go, self._order, self._name = threading.Event(), threading.Event(), order, name

    def __call__(self, check: Check) -> None:
        self.began.set()
        while not self.go.wait(0.002):
            check()
        self._order.append(self._name)


async def test_work_that_has_had_its_slice_lets_others_go_first() -> None:
    pool, order = Pool("test", 1, slice_s=0.02), list[str]()
    long = Long(order, "long")
    running = asyncio.ensure_future(pool.run("interactive", long))
    await until(long.began)
    others = [pool.run("interactive", noting(order, name)) for name in ("one", "two")]
    await asyncio.wait_for(asyncio.gather(*others), SOON_S)
    long.go.set()
    await asyncio.wait_for(running, SOON_S)
    assert order == ["one", "two", "long"]


async def test_works_that_have_had_their_slice_run_in_turn_and_one_at_a_time() -> None:
    pool, at_work, num_at_work, steps = Pool("test", 1, slice_s=0.005), set[int](), list[int](), dict[int, int]()

    def work(number: int, check: Check) -> None:
        for step in range(40):
            at_work.add(number)
            num_at_work.append(len(at_work))
            time.sleep(0.001)
            steps[number] = step
            at_work.discard(number)
            check()
            if step == 39:
                finished.append(dict(steps))

    finished = list[dict[int, int]]()
    await asyncio.wait_for(
        asyncio.gather(*(pool.run("interactive", partial(work, number)) for number in range(4))), 4 * SOON_S
    )
    assert max(num_at_work) == 1
    assert len(finished[0]) == 4  # each had begun before one had ended


async def test_a_pause_does_not_count_towards_the_longest_time() -> None:
    pool, order = Pool("test", 1, timeout_s=1.5, slice_s=0.02), list[str]()
    first = Long(order, "first")
    running = asyncio.ensure_future(pool.run("interactive", first))
    await until(first.began)
    await asyncio.gather(*(pool.run("interactive", native(1.0)) for _ in range(2)))
    first.go.set()
    await asyncio.wait_for(running, SOON_S)
    assert order == ["first"]


async def test_a_job_that_goes_while_its_work_pauses_ends_it_and_takes_no_slot_with_it() -> None:
    pool, blocked, order = Pool("test", 1, slice_s=0.02), Blocked(), list[str]()
    paused, holding = Blocked(), threading.Event()

    def native_work(check: Check) -> None:
        blocked.began.set()
        holding.wait()

    running = asyncio.ensure_future(pool.run("interactive", paused))
    await until(paused.began)
    other = asyncio.ensure_future(pool.run("interactive", native_work))
    await until(blocked.began)
    running.cancel()
    await until(paused.abandoned)
    third = asyncio.ensure_future(pool.run("interactive", noting(order, "third")))
    await asyncio.sleep(0.05)
    assert order == []  # the thread is still at work
    holding.set()
    await asyncio.wait_for(asyncio.gather(other, third), SOON_S)
    assert order == ["third"]


async def test_a_tenant_s_large_texts_do_not_hold_up_another_s_by_more_than_one() -> None:
    pool, first, order = Pool("test", 1), Blocked(), list[str]()
    running = [asyncio.ensure_future(pool.run("interactive", first, "greedy"))]
    await until(first.began)
    for number in range(5):
        work = noting(order, f"greedy {number}")
        running.append(asyncio.ensure_future(pool.run("interactive", work, "greedy")))  # type: ignore[arg-type]
    running.append(asyncio.ensure_future(pool.run("interactive", noting(order, "small"), "small")))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    first.go.set()
    await asyncio.wait_for(asyncio.gather(*running), SOON_S)
    assert order.index("small") <= 1


async def test_offline_work_leaves_the_reserved_threads_to_interactive_work() -> None:
    pool, works = Pool("test", 2, reserved=1), [Blocked(), Blocked()]
    offline = [asyncio.ensure_future(pool.run("batch", work)) for work in works]
    await until(works[0].began)
    assert await asyncio.wait_for(pool.run("interactive", lambda check: "done"), SOON_S) == "done"
    assert not works[1].began.is_set()
    for work in works:
        work.go.set()
    await asyncio.wait_for(asyncio.gather(*offline), SOON_S)


def native(seconds: float) -> Callable[[Check], None]:
    return lambda check: time.sleep(seconds)


async def test_what_the_work_raises_is_raised() -> None:
    def late(check: Check) -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await Pool("test", 1).run("interactive", late)


def never_called(check: Check) -> None:
    never()
