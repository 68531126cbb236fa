"""The Lua scripts that producers and workers share. Here, because a backend has no `worker`."""

from functools import cache
from importlib.resources import files

SHARED = ("submit", "cancel")


@cache
def shared(name: str) -> str:
    return (files("sluice") / "lua" / f"{name}.lua").read_text()


@cache
def source(name: str) -> str:
    """One script with what it calls in front of it."""
    return "\n".join(map(shared, ("lib", "index", name)))
