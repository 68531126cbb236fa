"""Loads Lua scripts. Those of this package are the clients', and those that clients and workers share."""

from functools import cache
from importlib.resources import files

LIBRARIES = ("lib", "index")  # in front of each script that writes to a job
_PARTS = {"cancel": ("ending",), "attended": ("ending",)}  # beside the libraries


def read(package: str, *names: str) -> str:
    """Return the text of files in the folder `lua` of a package, one after the other."""
    folder = files(package) / "lua"
    return "\n".join((folder / f"{name}.lua").read_text("utf-8") for name in names)


@cache
def source(name: str) -> str:
    """Return one script of this package, preceded by the library code that it calls."""
    return read("sluice.contract", *LIBRARIES, *_PARTS.get(name, ()), name)
