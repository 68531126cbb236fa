"""A worker dies, another goes on, and the subscriber's text never changes or repeats."""

import asyncio
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis.asyncio

from sluice import Client, Delta, Event, Finished
from tests.end_to_end.test_exact import checkpoint
from tests.engine.tiny import CONFIGS, write_checkpoint
from tests.keyspace import check_job_keys
from tests.support.stack import WorkerProcess

LEASE_S = 2.0
KILLED = "tests.end_to_end.killed_in_answers"
TOKENS = 120  # enough to reach the stop string


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in fp32: equal whether a token was decoded or prefilled."""
    return checkpoint("tiny_chat", tmp_path_factory.mktemp("tiny"))


@dataclass
class Seen:
    events: list[Event] = field(default_factory=list)
    gap_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(event.content or "" for event in self.events if isinstance(event, Delta))

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Delta) for token in event.token_ids]

    @property
    def usage(self) -> tuple[int, int | None]:
        (last,) = [event for event in self.events if isinstance(event, Finished)]
        return last.usage.completion_tokens, last.usage.reasoning_tokens

    def kinds(self) -> list[str]:
        return [event.type for event in self.events if event.type not in ("delta", "progress")]


async def watch(client: Client, job_id: str) -> Seen:
    seen, last = Seen(), 0.0
    async for event in client.stream(job_id):
        now = time.monotonic()
        seen.gap_s = max(seen.gap_s, now - last if last else 0.0)
        last = now
        seen.events += [event] if event.stored else []
    return seen


def requests() -> list[dict[str, object]]:
    """Greedy, seeded, penalties, a stop string across tokens, unicode, budgets: each long enough to be cut."""
    no_end = {"logit_bias": {"2": -100}, "max_tokens": TOKENS}
    chat = [{"role": "user", "content": "Count to 40."}]
    think = [{"role": "user", "content": "Think: what is 8 plus 3?"}]
    endless_thought = {"logit_bias": {"2": -100, "4": -100}, "max_tokens": TOKENS}
    unicode = [{"role": "user", "content": "Repeat after me: 🚀日本 👩‍💻 é 🇯🇵 жщ"}]
    return [
        {"messages": chat, **no_end, "temperature": 0},
        {"messages": chat, **no_end, "temperature": 1.3, "seed": 7},
        {"messages": unicode, **no_end, "temperature": 1.1, "top_p": 0.95, "seed": 8},
        {"messages": chat, **no_end, "temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.3},
        {"messages": chat, **no_end, "temperature": 0, "stop": ["39 40 never", " 38 39"]},
        {"messages": unicode, **no_end, "temperature": 0.9},
        # Thoughts that are closed before the worker dies, and after it.
        {"messages": think, **endless_thought, "temperature": 0, "max_reasoning_tokens": 8},
        {"messages": think, **endless_thought, "temperature": 1.1, "seed": 9, "max_reasoning_tokens": 60},
    ]


async def run_all(client: Client, prefix: str) -> list[Seen]:
    asked = requests()
    jobs = [await client.submit(request, id=f"{prefix}-{i:02}") for i, request in enumerate(asked)]
    return await asyncio.gather(*(watch(client, job.id) for job in jobs))


async def test_a_killed_workers_streams_go_on_unchanged(
    redis_url: str, client: Client, db: redis.asyncio.Redis, model: Path
) -> None:
    settings = {"model": model, "lease_s": LEASE_S, "max_rows": 16, "prefix_cache_gb": 0}
    with WorkerProcess(redis_url, name="first", module=KILLED, **settings) as first:
        broken = asyncio.create_task(run_all(client, "same"))
        assert await asyncio.to_thread(first.wait) == -signal.SIGKILL
    with WorkerProcess(redis_url, name="second", **settings) as second:
        resumed = await asyncio.wait_for(broken, 120)
        for i in range(len(resumed)):
            await check_job_keys(db, f"same-{i:02}")
        await db.flushdb()
        await asyncio.to_thread(second.wait_ready)
        unbroken = await asyncio.wait_for(run_all(client, "same"), 120)
    limited = [seen for seen, asked in zip(unbroken, requests(), strict=True) if "max_reasoning_tokens" in asked]
    assert all(4 in seen.tokens for seen in limited)  # a marker that only a budget writes
    for before, after in zip(unbroken, resumed, strict=True):
        assert after.usage == before.usage
        assert after.tokens == before.tokens
        assert after.text == before.text
        assert [event.seq for event in after.events] == list(range(len(after.events)))
        assert "restarted" not in after.kinds()
        assert after.kinds()[-1] == "finished"
    assert any("resumed" in seen.kinds() for seen in resumed), "nothing was cut"


@pytest.mark.slow
async def test_another_model_starts_over_and_says_so(redis_url: str, client: Client, tmp_path: Path) -> None:
    request = requests()[0]
    with WorkerProcess(redis_url, name="first", module=KILLED, lease_s=1) as first:
        job = await client.submit(request)
        watching = asyncio.create_task(watch(client, job.id))
        assert await asyncio.to_thread(first.wait) == -signal.SIGKILL
    other = write_checkpoint(CONFIGS["qwen3"], tmp_path)
    with WorkerProcess(redis_url, name="second", model=other, lease_s=1):
        seen = await asyncio.wait_for(watching, 120)
    assert seen.kinds() == ["started", "restarted", "finished"]
    again = seen.events[[event.type for event in seen.events].index("restarted") :]
    assert sum(len(event.token_ids) for event in again if isinstance(event, Delta)) == TOKENS
