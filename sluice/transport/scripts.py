"""The Lua scripts of a producer."""

from functools import cache
from importlib.resources import files

_PARTS = {"cancel": ("ending",), "attended": ("ending",)}  # beside `lib` and `index`


@cache
def source(name: str) -> str:
    """Return one script, preceded by the library code that it calls."""
    lua = files("sluice") / "lua"
    return "\n".join((lua / f"{part}.lua").read_text("utf-8") for part in ("lib", "index", *_PARTS.get(name, ()), name))
