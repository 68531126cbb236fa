"""The Lua scripts of a producer."""

from functools import cache
from importlib.resources import files


@cache
def source(name: str) -> str:
    """One script, with what it calls in front of it."""
    lua = files("sluice") / "lua"
    return "\n".join((lua / f"{part}.lua").read_text() for part in ("lib", "index", name))
