"""Two workers of one model share a queue: a conversation is computed by the one that holds it."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice import Client, Finished
from sluice.contract import keys
from tests.support.stack import WorkerProcess
from tests.waiting import until

FLEET = keys.fleet("default")


@contextmanager
def two_workers(redis_url: str, **settings: object) -> Iterator[dict[str, WorkerProcess]]:
    with ExitStack() as stack:
        workers = [WorkerProcess(redis_url, name=name, **{"max_rows": 4, "lease_s": 3, **settings}) for name in "ab"]
        for worker in workers:
            worker.start(wait=False)
            stack.callback(worker.stop)
        for worker in workers:
            worker.wait_ready()
        yield {worker.name: worker for worker in workers}


class Talk:
    """A conversation, whose turns are 1 kB each: a mark at least."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._messages = [{"role": "system", "content": f"You know all about {topic}. " * 60}]
        self.ends: list[Finished] = []
        self.workers: list[str] = []

    async def say(self, text: str, max_tokens: int = 4) -> None:
        self._messages.append({"role": "user", "content": f"{text} " * (1_000 // (len(text) + 1))})
        request = {"messages": self._messages, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        job = await self._client.submit(request)
        events = [event async for event in self._client.stream(job.id)]
        result: dict[str, Any] = await self._client.result(job.id)
        assert isinstance(events[-1], Finished), events[-1]
        self._messages.append({"role": "assistant", "content": result["choices"][0]["message"]["content"]})
        self.ends.append(events[-1])
        self.workers.append(result["sluice"]["worker"])

    @property
    def cached(self) -> list[int]:
        return [end.usage.cached_tokens for end in self.ends]


async def records(db: Redis) -> list[list[float]]:
    return [[float(word) for word in text.split(b" ")] for text in await db.hvals(FLEET)]


async def test_the_turns_of_a_chat_go_to_the_worker_that_holds_it(redis_url: str, client: Client, db: Redis) -> None:
    with two_workers(redis_url):
        talk = Talk(client, "rivers")
        for turn in range(5):
            await talk.say(f"Tell me more, for the {turn}th time.")
        assert set(talk.workers) == {talk.workers[0]}
        prompts = [end.usage.prompt_tokens for end in talk.ends]
        # The answer's text may have other tokens than those that were drawn.
        assert all(found >= before - 1 for before, found in zip(prompts, talk.cached[1:], strict=False))


async def test_a_chat_goes_on_elsewhere_when_its_worker_is_killed_in_the_middle_of_a_turn(
    redis_url: str, client: Client, db: Redis
) -> None:
    with two_workers(redis_url) as workers:
        talk, other = Talk(client, "rivers"), Talk(client, "mountains")
        await talk.say("Where is the longest one?")
        turn = asyncio.create_task(asyncio.wait_for(talk.say("And the widest one?", max_tokens=200), 120))
        await until(lambda: _has_first_token(workers[talk.workers[0]], 2))
        workers[talk.workers[0]].kill()
        await asyncio.gather(turn, other.say("Which one is the highest?"))
        await talk.say("And the deepest one?")
        (survivor,) = workers.keys() - {talk.workers[0]}
        assert talk.workers[1:] == [survivor, survivor]
        assert len(talk.ends) == 3
        assert talk.ends[-1].usage.cached_tokens > 0
        await until(lambda: _is_alone(db), within_s=15)  # the record of the dead is deleted


def _has_first_token(worker: WorkerProcess, times: int) -> bool:
    return len(re.findall("first token after", worker.log())) >= times


async def _is_alone(db: Redis) -> bool:
    return bool(await db.hlen(FLEET) == 1)


@pytest.mark.slow
async def test_the_record_of_a_worker_agrees_with_its_answers(redis_url: str, client: Client, db: Redis) -> None:
    with WorkerProcess(redis_url, max_rows=2, lease_s=1):
        talk = Talk(client, "rivers")
        for turn in range(4):
            await talk.say(f"Tell me more, for the {turn}th time.")
        before = [*talk.ends]

        async def is_idle() -> bool:
            return (await records(db))[0][8:] == [0] * 8

        await until(is_idle)
        ((_, _, free, rows, _, token_us, before_ns, per_kib, *_),) = await records(db)
        assert (free, rows) == (2, 2)
        kib = len(str(talk._messages)) / 1024
        assert per_kib == pytest.approx(talk.ends[-1].usage.prompt_tokens / kib, rel=0.25)
        lasted_s = [end.timings.prefill_s for end in before]
        computed = [(end.usage.cached_tokens, end.usage.prompt_tokens) for end in before]
        expected_s = [
            (end - start) * token_us * 1e-6 + (end**2 - start**2) / 2 * before_ns * 1e-9 for start, end in computed
        ]
        # Of a machine that other tests use too; what is left out is tokenizing, and the joining of rows.
        assert sum(expected_s) == pytest.approx(sum(lasted_s), rel=0.7)
