"""The live workers, each of which publishes a hash about itself on the server, and the jobs that they leave behind."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from sluice.contract import keys
from sluice.contract.models import Command as ModelCommand
from sluice.contract.models import Model, is_supervisor, read_model
from sluice.contract.scripts import source
from sluice.transport import MAX_CALLS, Command, Retries, RoundTrips, raise_outage


def serves(worker: Mapping[str, str]) -> bool:
    """Return True if the worker of these fields takes jobs: one that drains ends its own, and no more."""
    return worker.get("state") != keys.DRAINING


NUMBERS = (
    "rows", "max_rows", "offline_rows", "jobs_per_s", "tokens_per_s", "load", "ttft_p50_ms", "ttft_p95_ms",
    "gap_p50_ms", "gap_p95_ms", "prefix_hit_rate", "claims_left", "claims_overruled", "prefix_hint_rate",
    "prefix_cache_bytes", "memory_bytes", "memory_limit_bytes", "queue_limit", "started_at", "protocol",
    "step_share", "offline_step_share",
)  # fmt: skip
HOST = "memory_pressure", "memory_reclaim", "machine"


def parse_worker(fields: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what a worker publishes of itself: `NUMBERS`; `name`, `model`, `version`, `state` and `HOST` as text;
    `images` as a bool. None for a foreign value under its key. A number that an earlier version does not publish, or
    that no worker wrote, is None."""
    if not fields.get("name") or not keys.is_model_name(fields.get("model", "")):
        return None
    texts = {name: fields.get(name, "")[:128] for name in ("name", "model", "version", *HOST)}
    state = "running" if serves(fields) else keys.DRAINING
    numbers = {name: _number(fields.get(name, "")) for name in NUMBERS}
    return {**texts, "state": state, **numbers, "images": fields.get("images") == "yes"}


def host_notes(worker: Mapping[str, Any]) -> str:
    """Return what a worker leaves to its machine and why, for people; "" if nothing."""
    words = [each.replace("_", " ") for each in worker["machine"].split() if each != "awake"]
    if worker["memory_pressure"] not in ("", "normal") or worker["memory_reclaim"] not in ("", "nothing"):
        given = worker["memory_reclaim"].replace("_", " ")
        words.append(f"memory {worker['memory_pressure']}, gives back {given}")
    share = worker["offline_step_share"]
    return "; ".join([*words, *([f"offline jobs have {share:.0%} of the time"] if share not in (None, 1) else [])])


def _number(text: str) -> float | None:
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,17})?(e-[0-9]{1,2})?", text):
        return None
    return int(text) if text.isdigit() else float(text)


class Workers:
    """Reads the hashes that workers publish. Foreign values under such a key are skipped."""

    def __init__(self, redis: Redis, retries: Retries, *, waits_out_outages: bool = False) -> None:
        self._redis = redis
        self._retries = retries
        self._waits_out_outages = waits_out_outages
        self._ask = redis.register_script(source("ask_worker"))
        self._alias = redis.register_script(source("alias"))

    async def read_all(self) -> list[dict[str, str]]:
        """Return the fields of each live worker."""
        found = await self._retries.scan(keys.WORKERS, waits_out_outages=self._waits_out_outages)
        workers = [await self._read(key) for key in found]
        return [worker for worker in workers if worker]

    async def ask(self, worker: Mapping[str, str], what: Literal["drain", "restart"]) -> bool:
        """Ask the process of these fields to drain or to restart. Returns False if it has ended."""
        name = worker.get("name", "")
        args = [name, worker.get("started_at", ""), what]
        return bool(await self._send(lambda: self._ask(keys=[keys.worker(name)], args=args)))

    async def models(self) -> set[str]:
        """Return the models that have a live worker which takes jobs, those that a supervisor loads for a job, and the
        aliases that stand for one."""
        served = {worker["model"] for worker in await self.read_all() if "model" in worker and serves(worker)}
        served |= {name for each in (await self.supervised()).values() for name in each}
        return served | {alias for alias, model in (await self.aliases()).items() if model in served}

    async def supervised(self) -> dict[str, dict[str, Model]]:
        """Return the models of each supervisor by their names. Those that the user may not read are left out."""
        found = await self._retries.scan(keys.MODELS, waits_out_outages=self._waits_out_outages)
        supervisors = dict[str, dict[str, Model]]()
        for key in sorted(filter(is_supervisor, found)):
            with suppress(ResponseError):  # a foreign value, or one that is not to be read
                fields: dict[bytes, bytes] = await self._send(partial(self._redis.hgetall, key))  # type: ignore[arg-type]
                models = {name.decode("utf-8", "replace"): read_model(value) for name, value in fields.items()}
                known = {name: model for name, model in sorted(models.items()) if model is not None}
                supervisors[key.decode("utf-8", "replace").removeprefix(keys.models(""))] = known
        return {supervisor: known for supervisor, known in supervisors.items() if known}

    async def ask_supervisor(self, supervisor: str, command: ModelCommand) -> None:
        """Ask a supervisor to load or to unload a model."""

        async def send() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.rpush(keys.model_commands(supervisor), json.dumps(command))
                pipe.pexpire(keys.model_commands(supervisor), 60_000)
                await pipe.execute()

        await self._send(send)

    async def aliases(self) -> dict[str, str]:
        """Return the model of each alias. A foreign value, or one that the user may not read, counts as none."""
        try:
            stored: dict[bytes, bytes] = await self._send(lambda: self._redis.hgetall(keys.ALIASES))
        except ResponseError:
            return {}
        names = [
            (alias.decode("utf-8", "replace"), model.decode("utf-8", "replace")) for alias, model in stored.items()
        ]
        return {alias: model for alias, model in sorted(names) if all(map(keys.is_model_name, (alias, model)))}

    async def set_alias(self, alias: str, model: str | None, *, served_only: bool) -> str | None:
        """Let a name stand for a model, or for none; return the model that it stood for. `served_only`: only for a
        model with a live worker. Raises ValueError, which says why not."""
        for name in (alias, model or alias):
            keys.check_model_name(name)
        outcome, other = await self._send(lambda: self._alias(args=[alias, model or "", int(served_only)]))
        if outcome != b"done":
            raise ValueError(_alias_refused(outcome.decode(), alias, model, other.decode("utf-8", "replace")))
        return other.decode("utf-8", "replace") or None

    async def _read(self, key: bytes) -> dict[str, str]:
        """Return the fields of one worker; empty if it has just exited, or if the key is not a hash."""
        if await self._send(lambda: self._redis.type(key)) != b"hash":
            return {}
        fields: dict[bytes, bytes] = await self._send(lambda: self._redis.hgetall(key))  # type: ignore[arg-type]
        return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in fields.items()}

    async def _send(self, command: Command) -> Any:
        return await (self._retries.run_until_answered if self._waits_out_outages else self._retries.run)(command)


def _alias_refused(why: str, alias: str, model: str | None, other: str) -> str:
    """Return why an alias is not set, and what would be right; see `alias.lua`."""
    return {
        "served": f"{alias!r} is served by live workers of that name; an alias must have a name of its own",
        "alias": f"{model!r} is an alias itself; give the model that it stands for: {other!r}",
        "target": f"the alias {other!r} stands for {alias!r}, and an alias stands for a model; move or remove it first",
        "self": f"{alias!r} cannot stand for itself; give the name that a worker serves",
        "unserved": f"no live worker serves {model!r}, so jobs would wait; start one first",
        "full": "there are 1,000 aliases, and no server keeps more; remove those that nobody uses",
    }[why]


def mapping_pair(name: str, mapped: Mapping[str, str]) -> str | None:
    """Return the left side of the pair that decides the served name for a name in a request: the name itself, else the
    longest beginning of it that is followed by `*`. None if no pair fits."""
    if name in mapped:
        return name
    fitting = (pair for pair in mapped if pair.endswith("*") and name.startswith(pair[:-1]))
    return max(fitting, key=len, default=None)


def mapped_name(name: str, mapped: Mapping[str, str]) -> str:
    """Return the served name for a name in a request, which is that name if no pair fits."""
    pair = mapping_pair(name, mapped)
    return name if pair is None else mapped[pair]


@dataclass(frozen=True, slots=True)
class _Attendance:
    """What a check of a job found. `workers`: live workers of its model; None if its state names no model. `loaded`:
    the bytes of its model's weights that are in memory, and all, while it is loaded for the job."""

    state: str | None
    attempt: int
    workers: int | None
    loaded: tuple[int, int] | None


class Attendances:
    """Checks jobs with the script `attended.lua`, which ends those whose deadline has passed and that no worker has."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries
        self._script = redis.register_script(source("attended"))
        self._checks = RoundTrips[str, _Attendance | None](self._wait_out)

    async def check(self, job_id: str) -> _Attendance | None:
        """Check a job, waiting out an outage. Returns None if the server refuses the check, for example since the user
        may only read: a reader goes on without it. Readers share round trips."""
        return await self._checks.call(job_id)

    async def check_all(self, job_ids: Sequence[str]) -> list[_Attendance | None]:
        """Check jobs, with the retries of a single call. As `check`, otherwise."""
        found = list[_Attendance | None]()
        for start in range(0, len(job_ids), MAX_CALLS):
            found += await self._retries.run(partial(self._run_all, job_ids[start : start + MAX_CALLS]))
        return found

    async def _wait_out(self, job_ids: Sequence[str]) -> Sequence[_Attendance | None]:
        found: list[_Attendance | None] = await self._retries.run_until_answered(partial(self._run_all, job_ids))
        return found

    async def _run_all(self, job_ids: Sequence[str]) -> list[_Attendance | None]:
        answers = await self._pipelined(job_ids)
        if any(isinstance(answer, NoScriptError) for answer in answers):  # a check may be repeated
            await self._redis.script_load(self._script.script)
            answers = await self._pipelined(job_ids)
        raise_outage(answers)
        return [None if isinstance(answer, Exception) else _attendance(answer) for answer in answers]

    async def _pipelined(self, job_ids: Sequence[str]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.evalsha(self._script.sha, 0, job_id, *keys.LIVES_MS)  # type: ignore[arg-type]
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        return answers


def _attendance(answer: Sequence[Any]) -> _Attendance:
    state, attempt, workers, loaded, weights = answer
    told = state and state.decode("utf-8", "replace")
    return _Attendance(told, attempt, None if workers < 0 else workers, (loaded, weights) if weights else None)
