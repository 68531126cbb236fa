"""`SyncClient`: threads, forks, interruptions and exits. What its calls do is the asynchronous client's to test."""

import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis import Redis

from sluice import Client, ServerUnreachable, Submitted, SyncClient, UnknownJob
from sluice.contract import keys
from sluice.sync import blocking
from tests.client.streaming import HELLO, event
from tests.support.stack import ROOT, Server

FINAL = event(3, "cancelled")
LOG = [event(0), event(1), event(2), FINAL]
WITHIN_S, AT_ONCE_S = 60.0, 15.0


@pytest.fixture
def server(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as server:
        yield server


@pytest.fixture
def sync_client(redis_url: str) -> Iterator[SyncClient]:
    with SyncClient(redis_url) as client:
        yield client


def write(server: Redis, *events: bytes, job_id: str = "a") -> None:
    for raw in events:
        server.rpush(keys.log(job_id), raw)
        server.publish(keys.channel(job_id), raw)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def subscribers(server: Redis, job_id: str = "a") -> int:
    return int(server.pubsub_numsub(keys.channel(job_id))[0][1])  # type: ignore[index]


def client_threads() -> set[threading.Thread]:
    """Return the threads of clients, among which those of earlier tests may still end."""
    return {thread for thread in threading.enumerate() if thread.name == "sluice-client"}


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


# One implementation


def of_client() -> dict[str, Callable[..., Any]]:
    """The public methods that wait for the server, but for what hands out an asynchronous client."""
    found = inspect.getmembers(Client, lambda of: inspect.iscoroutinefunction(of) or inspect.isasyncgenfunction(of))
    return {
        name: method
        for name, method in found
        if not name.startswith("_") and name not in ("aclose", "of_job", "ask_all")
    }


def test_every_method_of_the_client_is_there_with_its_parameters_and_docstring() -> None:
    for name, method in of_client().items():
        ours = getattr(SyncClient, name)
        assert (inspect.signature(ours), ours.__doc__) == (inspect.signature(method), method.__doc__)


async def test_calls_answer_as_the_asynchronous_client_does_even_below_a_running_loop(
    server: Redis, client: Client, sync_client: SyncClient
) -> None:
    write(server, *LOG)
    server.set(keys.result("a"), '{"object": "chat.completion"}')
    server.hset(keys.job("a"), "state", "finished")
    server.hset("sluice:worker:ada", "name", "ada")
    assert sync_client.submit(HELLO, id="new") == Submitted("new", new=True, state="queued")
    assert sync_client.submit(HELLO, id="new") == await client.submit(HELLO, id="new")
    assert list(sync_client.stream("a")) == [event async for event in client.stream("a")]
    assert list(sync_client.stream_json("a", after=1)) == LOG[2:]
    assert sync_client.result("a") == await client.result("a")
    assert sync_client.state("a") == await client.state("a") == "finished"
    assert sync_client.queued("default", "interactive") == await client.queued("default", "interactive") == 1
    assert sync_client.workers() == await client.workers() == [{"name": "ada"}]
    assert sync_client.cancel("new") == "cancelled"
    assert sync_client.purge("default", "interactive") == 0
    sync_client.ping()


def test_errors_are_the_asynchronous_client_s(sync_client: SyncClient) -> None:
    with pytest.raises(UnknownJob):
        list(sync_client.stream("nobody", unknown_s=0))
    with pytest.raises(ValueError, match="job id"):
        sync_client.result("a b")
    sync_client.submit(HELLO, id="a")
    with pytest.raises(TimeoutError):
        sync_client.result("a", timeout=0.1)


def test_a_url_that_cannot_be_read_is_refused_before_any_call() -> None:
    with pytest.raises(ValueError, match="not the URL of a server"):
        SyncClient("http://localhost")


# Streams


@pytest.mark.parametrize("leave", ["break", "close", "garbage"])
def test_a_stream_that_is_left_early_ends_its_subscription(server: Redis, sync_client: SyncClient, leave: str) -> None:
    write(server, event(0))
    stream = sync_client.stream("a")
    assert next(stream).seq == 0
    assert subscribers(server) == 1
    if leave == "break":
        for _ in sync_client.stream("a"):
            break
    if leave == "garbage":
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()
    else:
        stream.close()
    wait_for(lambda: subscribers(server) == 0)


def test_streams_of_many_threads_share_one_thread_and_few_connections(server: Redis, redis_url: str) -> None:
    names, others = [f"job-{k}" for k in range(24)], client_threads()
    before = {each["id"] for each in server.client_list()}  # of earlier tests, which may close meanwhile

    def connections() -> int:
        return len({each["id"] for each in server.client_list()} - before)

    with SyncClient(redis_url) as client, ThreadPoolExecutor(len(names)) as pool:
        streams = [pool.submit(lambda name: [event.seq for event in client.stream(name)], name) for name in names]
        for name in names:
            wait_for(lambda name=name: subscribers(server, name) == 1)  # type: ignore[misc]
        assert len(client_threads() - others) == 1
        for raw in LOG:
            for name in names:
                write(server, raw, job_id=name)
        assert [stream.result(WITHIN_S) for stream in streams] == [[0, 1, 2, 3]] * len(names)
        assert connections() <= len(names) + 1
    wait_for(lambda: connections() == 0)


def test_a_stream_rides_out_a_restart_of_the_server() -> None:
    with Server() as server, SyncClient(server.url) as client, ThreadPoolExecutor(1) as pool:
        client.ping()
        stream = pool.submit(lambda: [event.seq for event in client.stream("a")])
        with Redis.from_url(server.url) as redis:
            wait_for(lambda: subscribers(redis) == 1)
        server.leave()
        time.sleep(0.5)
        server.start()
        with Redis.from_url(server.url) as redis:
            write(redis, *LOG)
        assert stream.result(WITHIN_S) == [0, 1, 2, 3]


def test_an_outage_that_lasts_is_raised() -> None:
    with Server() as server:
        url = server.url
    with SyncClient(url, outage_s=0.2) as client:
        with pytest.raises(ServerUnreachable):
            client.ping()
        with pytest.raises(ServerUnreachable):
            list(client.stream("a"))


# Ends


@pytest.mark.parametrize("waits", ["stream", "result"])
def test_ctrl_c_ends_a_wait_and_its_subscription_and_the_client_goes_on(
    server: Redis, sync_client: SyncClient, waits: str
) -> None:
    sync_client.submit(HELLO, id="a")

    def interrupt() -> None:
        wait_for(lambda: subscribers(server) == 1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        list(sync_client.stream("a")) if waits == "stream" else sync_client.result("a")
    wait_for(lambda: subscribers(server) == 0)
    write(server, *LOG)
    assert len(list(sync_client.stream("a"))) == 4


def test_a_client_that_was_forgotten_ends_its_thread(redis_url: str) -> None:
    before = client_threads()
    client = SyncClient(redis_url)
    client.ping()
    (own,) = client_threads() - before
    del client
    gc.collect()
    wait_for(lambda: not own.is_alive())


def test_closing_ends_what_waits_in_other_threads_and_a_later_call_starts_anew(server: Redis, redis_url: str) -> None:
    client, before = SyncClient(redis_url), client_threads()
    for job_id in ("a", "b"):
        client.submit(HELLO, id=job_id)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.result, "a"), pool.submit(list, client.stream("b"))]
        wait_for(lambda: subscribers(server, "a") == subscribers(server, "b") == 1)
        client.close()
        for call in waiting:
            assert isinstance(call.exception(WITHIN_S), RuntimeError)
    assert client_threads() <= before
    assert client.state("a") == "queued"
    client.close()
    client.close()


def test_a_callback_that_calls_its_own_client_is_told_so(sync_client: SyncClient) -> None:
    async def callback(client: Client) -> None:
        sync_client.ping()

    with pytest.raises(RuntimeError, match="callback"):
        blocking(callback)(sync_client)
    sync_client.ping()


def test_the_first_calls_of_many_threads_start_one_thread(sync_client: SyncClient) -> None:
    before, barrier = client_threads(), threading.Barrier(16)

    def ping() -> None:
        barrier.wait()
        sync_client.ping()

    with ThreadPoolExecutor(16) as pool:
        for call in [pool.submit(ping) for _ in range(16)]:
            call.result(WITHIN_S)
    assert len(client_threads() - before) == 1


EXIT = """
import sys, threading
from sluice import SyncClient

client = SyncClient(sys.argv[1])
client.submit([], id="a")
open_stream = client.stream("before")
next(open_stream)
threading.Thread(target=client.result, args=("a",), daemon=True).start()
print("end")
"""


def test_a_process_that_forgets_to_close_exits_at_once_and_in_silence(server: Redis, redis_url: str) -> None:
    write(server, event(0), job_id="before")
    began = time.monotonic()
    ran = run(EXIT, redis_url)
    assert (ran.returncode, ran.stdout) == (0, "end\n"), ran.stderr
    assert time.monotonic() - began < AT_ONCE_S


# Forks

FORK = """
import asyncio, gc, os, signal, sys, threading
from redis import Redis
from sluice import SyncClient
from sluice.contract import keys

url, final = sys.argv[1], sys.argv[2].encode()
client, server = SyncClient(url), Redis.from_url(url)
waiting = threading.Thread(target=lambda: list(client.stream("a")))  # in another thread over the fork
waiting.start()
stream = client.stream("a")
seen = [next(stream).seq for _ in range(3)]
if pid := os.fork():
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
    assert client.submit([], id="child").new is False
    assert client.submit([], id="parent").new is True
    server.rpush(keys.log("a"), final)
    server.publish(keys.channel("a"), final)
    assert seen + [event.seq for event in stream] == [0, 1, 2, 3]
    waiting.join(60)
    assert not waiting.is_alive()
    print("parent", flush=True)
else:
    signal.alarm(50)
    assert client.submit([], id="child").new is True
    fresh = client.stream("a", after=0)
    assert [next(fresh).seq, next(fresh).seq] == [1, 2]
    try:
        next(stream)
    except RuntimeError:
        print("child", flush=True)
    if sys.argv[3] == "forgets":
        async def forget():
            global client, stream, fresh
            client = stream = fresh = None
            gc.collect()
        asyncio.run(forget())
    sys.exit(0)
"""


@pytest.mark.parametrize("end", ["exits", "forgets"])
def test_after_a_fork_parent_and_child_both_go_on(server: Redis, redis_url: str, end: str) -> None:
    write(server, *LOG[:3])
    ran = run(FORK, redis_url, FINAL.decode(), end)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "child\nparent\n", "")


LOCKED = """
import os, signal, sys, threading, time
from sluice import SyncClient

client = SyncClient(sys.argv[1])
opened = client._open
client._open = lambda: (time.sleep(1), opened())[1]  # the first call of a thread holds the lock over the fork
threading.Thread(target=client.ping).start()
time.sleep(0.3)
if pid := os.fork():
    _, status = os.waitpid(pid, 0)
    sys.exit(status)
signal.alarm(50)
client.ping()
print("child")
"""


def test_a_fork_during_another_thread_s_first_call_leaves_the_child_no_lock(redis_url: str) -> None:
    ran = run(LOCKED, redis_url)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "child\n", "")
