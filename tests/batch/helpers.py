"""Helpers: input files, result files, and a worker that answers the lines."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from sluice import Batch, Client
from sluice.batch.folder import RunFolder, feed_runs
from sluice.batch.lines import Models
from sluice.batch.source import FileScan, Source
from tests.fakes import FakeChat
from tests.queue.helpers import until
from worker.errors import JobFailure

ANY: Models = {"*": "default"}
HELLO = [{"role": "user", "content": "Hello"}]


def line(custom_id: str, **changed: Any) -> dict[str, Any]:
    """Return a line. `changed`: fields of the line, or of its body if the line has no such field."""
    said: dict[str, Any] = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
    body = {"messages": HELLO, **{name: value for name, value in changed.items() if name not in (*said, "body")}}
    return {**said, "body": body, **{name: value for name, value in changed.items() if name in (*said, "body")}}


def says(custom_id: str, words: str = "hi", **more: Any) -> dict[str, Any]:
    """Return a line that `tests.fakes.FakeChat` answers with `words`."""
    return line(custom_id, say=[words], **more)


def as_bytes(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def write(path: Path, *lines: Mapping[str, Any]) -> Path:
    path.write_bytes(as_bytes(lines))
    return path


def scan(path: Path, models: Models = ANY, **limits: int) -> FileScan:
    with Source(path, models) as source:
        return source.scan(**limits)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in path.read_bytes().splitlines()]


def ids(path: Path) -> list[str]:
    return [said["custom_id"] for said in read(path)]


class Chat(FakeChat):
    """Answers lines. A line may set `fails`, the number of failures before it is answered, and `refuse`, their type;
    and `ends`, its finish reason, for a result with a choice, whose tool calls are `calls`. `needs`: the tokens that an
    answer needs, `broken`: how many first tries say no JSON, `shy`: how many are refused, `later`: the type of failure
    of all but the first, or "hang"."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[dict[str, Any]] = []
        self._tries = Counter[str]()

    async def chat(self, ctx: dict[Any, Any], request: dict[str, Any]) -> Any:
        self.requests.append(request)
        key = str(request.get("say"))
        self._tries[key] += 1
        if self._tries[key] <= request.get("fails", 0):
            raise JobFailure(request.get("refuse", "overloaded"), "No room.", retryable=request.get("retryable", True))
        if "later" in request and self._tries[key] > 1:
            if request["later"] != "hang":
                raise JobFailure(request["later"], "No.")
            request = {**request, "then": "hang"}
        done = await super().chat(ctx, request)
        if {"needs", "broken", "shy"} & request.keys():
            done.result.update(self._completion(request, self._tries[key]))
        if "ends" in request:
            message = {"role": "assistant", "content": "".join(request["say"]), "tool_calls": request.get("calls")}
            done.result["choices"] = [{"index": 0, "message": message, "finish_reason": request["ends"]}]
        return done

    def _completion(self, request: dict[str, Any], tries: int) -> dict[str, Any]:
        limit = request.get("max_completion_tokens") or request.get("max_tokens") or 100
        needs = request.get("needs", 1)
        text = "no JSON" if tries <= request.get("broken", 0) else json.dumps("x" * min(limit, needs))
        message = {"role": "assistant", "content": text, "refusal": None}
        if tries <= request.get("shy", 0):
            message = {"role": "assistant", "content": None, "refusal": "I would rather not."}
        reason = "length" if limit < needs else "stop"
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": min(limit, needs),
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        timings = {"prefill_s": 0.5, "ttft_s": 1.0, "decode_s": min(limit, needs) * 1.0}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        ours = {"timings": timings, "rows_mean": 2.0, "seed": request.get("seed")}
        return {"model": "default", "choices": [choice], "usage": usage, "sluice": ours}


async def left(db: Redis) -> list[bytes]:
    """Return the keys on the server that belong neither to a worker nor to a run."""
    found = [key async for key in db.scan_iter()]
    others = b"worker", b"model", b"batch", b"fleet", b"ready"
    return [key for key in found if not key.startswith(tuple(b"sluice:%s:" % name for name in others))]


async def started(client: Client, many: Path, out: Path, **how: Any) -> asyncio.Task[Batch]:
    """Start a run, and return its task when some lines have ended."""
    task = asyncio.create_task(client.batch(many, out, models=ANY, **how))
    await until(lambda: (out.exists() and out.stat().st_size > 0) or task.done())
    return task


async def leave(task: asyncio.Task[Batch]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def holds(db: Redis, queue: str, jobs: int) -> bool:
    """Return True if the queue holds this number of jobs."""
    return bool(await db.zcard(queue) == jobs)


async def feed_folder(client: Client, folder: Path, *, take: bool, models: Mapping[str, str]) -> None:
    """Make one pass over a folder, as `sluice batch feed` does."""
    await feed_runs(client.redis, RunFolder(folder.absolute()), take=take, models=models)
