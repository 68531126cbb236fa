"""The Lua scripts."""

from functools import cache
from importlib.resources import files

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

JOB_LIFE_MS = 86_400_000  # of a job that has not ended: arq's own default for a queued body


# What a script calls, besides `lib` and `index`. Those two and `cancel` are in `sluice` as well, since a backend has no
# `worker`; a test holds them equal.
_PARTS = {"claim": ("places", "mend"), "release": ("places",)}


@cache
def source(name: str) -> str:
    lua = files("worker.queue") / "lua"
    return "\n".join((lua / f"{part}.lua").read_text() for part in ("lib", "index", *_PARTS.get(name, ()), name))


def script(redis: Redis, name: str) -> AsyncScript:
    """Loads itself again when a server that was restarted or failed over has forgotten it."""
    return redis.register_script(source(name))
