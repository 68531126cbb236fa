"""Loads the Lua scripts."""

from functools import cache
from importlib.resources import files

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

JOB_LIFE_MS = 86_400_000  # expiry of the keys of a job that has not ended: arq's default for a queued body


# Files that a script needs in addition to `lib` and `index`. These two and `cancel` are in `sluice` too, since a
# backend does not install `worker`; a test checks that the copies are equal.
_PARTS = {"claim": ("places", "reconcile"), "release": ("places",)}


@cache
def source(name: str) -> str:
    """Return the text of a script, after the files that it needs."""
    lua = files("worker.queue") / "lua"
    return "\n".join((lua / f"{part}.lua").read_text() for part in ("lib", "index", *_PARTS.get(name, ()), name))


def script(redis: Redis, name: str) -> AsyncScript:
    """Return a callable script. It loads itself again if the server has lost it in a restart or failover."""
    return redis.register_script(source(name))
