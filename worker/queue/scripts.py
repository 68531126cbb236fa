"""Loads the Lua scripts."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from sluice.contract import keys, scripts

Argument = bytes | str | int

JOB_LIFE_MS = keys.JOB_LIFE_S * 1000

# Files that a script needs beside the libraries of `sluice.contract`.
_PARTS = {
    "claim": ("arguments", "places", "reconcile", "ownership", "selection", "share", "choose", "affinity"),
    "final": ("arguments", "share"),
    "release": ("places",),
    "record": ("arguments",),
}
_SHARED = {"forward": ("names",), "claim": ("fleet",), "final": ("notify",)}  # of `sluice.contract`


@cache
def worker_source(name: str) -> str:
    """Return the text of a script of workers, after the files that it needs."""
    own = scripts.read_lua("worker.queue", *_PARTS.get(name, ()), name)
    return "\n".join((scripts.read_lua("sluice.contract", *scripts.LIBRARIES, *_SHARED.get(name, ())), own))


def script(redis: Redis, name: str) -> AsyncScript:
    """Return a callable script. It loads itself again if the server has lost it in a restart or failover."""
    return redis.register_script(worker_source(name))


def arguments(**named: Argument | Sequence[Argument]) -> list[Argument]:
    """Return the arguments of a script that reads them by name: see `arguments.lua`. Before the items of a list, their
    number is written."""
    argv = list[Argument]()
    for name, value in named.items():
        argv.append(name)
        argv += [value] if isinstance(value, bytes | str | int) else [len(value), *value]
    return argv


def reply_fields(reply: Sequence[Any]) -> dict[str, Any]:
    """Return a script's reply of names and values."""
    return {name.decode(): value for name, value in zip(reply[::2], reply[1::2], strict=True)}
