"""Loads the Lua scripts."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

Argument = bytes | str | int

JOB_LIFE_MS = 86_400_000  # expiry of the keys of a job that has not ended: arq's default for a queued body


# Files that a script needs beside `lib` and `index`. These two, `ending` and `cancel` are in `sluice` too, since
# a backend does not install `worker`; a test checks that the copies are equal.
_PARTS = {
    "cancel": ("ending",),
    "claim": ("arguments", "places", "reconcile", "ownership", "selection", "share"),
    "final": ("arguments", "share"),
    "release": ("places",),
}


@cache
def source(name: str) -> str:
    """Return the text of a script, after the files that it needs."""
    lua = files("worker.queue") / "lua"
    return "\n".join((lua / f"{part}.lua").read_text("utf-8") for part in ("lib", "index", *_PARTS.get(name, ()), name))


def script(redis: Redis, name: str) -> AsyncScript:
    """Return a callable script. It loads itself again if the server has lost it in a restart or failover."""
    return redis.register_script(source(name))


def arguments(**named: Argument | Sequence[Argument]) -> list[Argument]:
    """Return the arguments of a script that reads them by name: see `arguments.lua`. Before the items of a list, their
    number is written."""
    argv = list[Argument]()
    for name, value in named.items():
        argv.append(name)
        argv += [value] if isinstance(value, bytes | str | int) else [len(value), *value]
    return argv


def named(reply: Sequence[Any]) -> dict[str, Any]:
    """Return a script's reply of names and values."""
    return {name.decode(): value for name, value in zip(reply[::2], reply[1::2], strict=True)}
