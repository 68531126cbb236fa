"""The driver, through HTTP and through the queue."""

import asyncio
import time
from random import Random

import pytest

from scripts.benchmarks.serve import clients, workload
from scripts.benchmarks.serve.driver import Reply, Request, Unanswered, drive, drive_beside
from scripts.benchmarks.serve.figures import Answer
from scripts.benchmarks.serve.workload import Chat, Turn
from tests.support.stack import WorkerProcess
from tests.support.stub_server import Stub, stub_server


class Recorder:
    """Answers each request after a pause, and keeps what it got with the time."""

    def __init__(self, pause_s: float = 0.0, *, refuse: str = "") -> None:
        self.began = time.perf_counter()
        self.requests = list[tuple[float, Request]]()
        self.running = self.most_running = 0
        self._pause_s = pause_s
        self._refuse = refuse

    async def send(self, request: Request) -> Reply:
        self.requests.append((time.perf_counter() - self.began, request))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self._pause_s)
        self.running -= 1
        if request.messages[-1]["content"] == self._refuse:
            raise Unanswered("refused")
        return Reply((time.perf_counter(),), f"answer {len(self.requests)}", 1, 9, 4)

    def texts(self) -> list[str]:
        return [request.messages[-1]["content"] for _, request in self.requests]


def chat(*texts: str, at_s: float = 0.0, think_s: float = 0.0) -> Chat:
    return Chat(tuple(Turn(text, 3, think_s if number else 0.0, at_s) for number, text in enumerate(texts)))


# The driver


async def test_chats_are_sent_at_their_times() -> None:
    recorder = Recorder()
    await drive(recorder.send, [chat("b", at_s=0.1), chat("a")], timeout_s=5)
    assert recorder.texts() == ["a", "b"]
    assert recorder.requests[1][0] >= 0.1


async def test_a_later_turn_has_the_answer_before_it_and_comes_after_the_pause() -> None:
    recorder = Recorder(0.05)
    answers = await drive(recorder.send, [chat("one", "two", think_s=0.6)], timeout_s=60)
    assert [message["content"] for message in recorder.requests[1][1].messages] == ["one", "answer 1", "two"]
    assert recorder.requests[1][0] >= 0.65
    assert answers[1].due_s >= 0.65
    assert answers[1].first_s < 0.65  # from when the turn was due, without the pause


async def test_one_by_one_counts_from_when_each_is_sent() -> None:
    recorder = Recorder(0.1)
    answers = await drive(recorder.send, [chat("a"), chat("b")], timeout_s=60, one_by_one=True)
    assert recorder.most_running == 1
    assert all(answer.first_s >= 0.1 for answer in answers)
    # If the second counted from the first's time, its seconds would be all that have passed.
    assert sum(answer.first_s for answer in answers) <= time.perf_counter() - recorder.began


async def test_turns_after_a_failed_one_count_as_failed() -> None:
    recorder = Recorder(refuse="two")
    answers = await drive(recorder.send, [chat("one", "two", "three")], timeout_s=5)
    assert [answer.error for answer in answers] == [None, "refused", "refused"]
    assert recorder.texts() == ["one", "two"]


async def test_a_turn_without_an_answer_in_time_has_failed() -> None:
    [answer] = await drive(Recorder(5.0).send, [chat("a")], timeout_s=0.05)
    assert answer.error
    assert not answer.good


@pytest.mark.timing
async def test_offline_chats_run_beside_and_stop_with_the_others() -> None:
    recorder = Recorder(0.05)
    answers, offline = await drive_beside(
        recorder.send, [chat("a", at_s=0.3)], workload.offline(Random(0)), 2, timeout_s=5
    )
    assert len(answers) == 1
    assert 4 <= len(offline) <= 14
    assert recorder.most_running == 3
    assert recorder.running == 0


# HTTP


async def posted(stub: Stub, chats: list[Chat]) -> list[Answer]:
    async with clients.openai(stub.url, "m") as send:
        return await drive(send, chats, timeout_s=20)


async def test_all_chats_are_with_the_server_at_once() -> None:
    with stub_server(together=40) as stub:
        answers = await posted(stub, [chat(f"text {i}") for i in range(40)])
    assert sorted(body["messages"][0]["content"] for body in stub.bodies) == sorted(f"text {i}" for i in range(40))
    assert [(a.tokens, a.prompt_tokens, a.cached_tokens, len(a.arrivals)) for a in answers] == [(3, 9, 4, 2)] * 40


async def test_a_reset_connection_is_tried_again_and_counted_from_the_first_attempt() -> None:
    with stub_server(to_reset=2) as stub:
        [answer] = await posted(stub, [chat("text")])
    assert (answer.error, answer.tokens, len(stub.bodies)) == (None, 3, 1)
    assert answer.first_s >= 2 * clients._RETRY_S


async def test_a_refusal_fails_the_turn_with_the_servers_words() -> None:
    with stub_server(status=429) as stub:
        [answer] = await posted(stub, [chat("text")])
    assert answer.error is not None
    assert "429: no room" in answer.error


async def test_an_answer_that_breaks_off_is_not_sent_again() -> None:
    with stub_server(broken=True) as stub:
        [answer] = await posted(stub, [chat("text")])
    assert answer.error is not None
    assert len(stub.bodies) == 1


async def test_a_request_is_greedy_streamed_and_names_its_tenant() -> None:
    with stub_server() as stub:
        await posted(stub, [Chat((Turn("text", 3),), tenant="t")])
    [body] = stub.bodies
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"], body["user"]) == (
        "m", 3, 0, True, "t",
    )  # fmt: skip


# The queue


async def test_chats_through_the_queue_agree_with_the_worker_about_the_first_token(
    worker: WorkerProcess, redis_url: str
) -> None:
    chats = workload.burst(4, 3, Random(0))
    async with clients.queue(redis_url, "default") as send:
        answers = await drive(send, chats, timeout_s=30)
    assert [answer.error for answer in answers] == [None] * 4
    for answer in answers:
        assert 1 <= answer.tokens <= 3
        assert answer.prompt_tokens > 5
        assert list(answer.arrivals) == sorted(answer.arrivals)
        assert answer.server_first_s is not None
        assert -0.5 < answer.first_s - answer.server_first_s < 5  # the clocks of two processes


async def test_a_request_that_the_worker_refuses_has_failed(worker: WorkerProcess, redis_url: str) -> None:
    async with clients.queue(redis_url, "default") as send:
        [answer] = await drive(send, [Chat((Turn("hello " * 100_000, 3),))], timeout_s=30)
    assert answer.error is not None
    assert "context" in answer.error
