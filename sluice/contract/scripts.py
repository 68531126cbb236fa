"""Loads Lua scripts. Those of this package are the clients', and those that clients and workers share."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from sluice.contract.keys import LIVES_MS

LIBRARIES = ("job_log", "index")  # in front of each script that writes to a job
_PARTS = {  # beside the libraries
    "cancel": ("notify", "ending"),
    "attended": ("notify", "ending"),
    "run_end": ("notify",),
    "submit": ("names", "fleet"),
    "alias": ("names",),
}


def read_lua(package: str, *names: str) -> str:
    """Return the text of files in the folder `lua` of a package, one after the other."""
    folder = files(package) / "lua"
    return "\n".join((folder / f"{name}.lua").read_text("utf-8") for name in names)


@cache
def source(name: str) -> str:
    """Return one script of this package, preceded by the library code that it calls."""
    return read_lua("sluice.contract", *LIBRARIES, *_PARTS.get(name, ()), name)


def cancel_args(
    job_id: str | bytes, *, lives_ms: Sequence[int] = LIVES_MS, keep_ms: int | str = "", call_id: str = ""
) -> list[str | bytes | int]:
    """Return the ARGV of `cancel.lua`. `lives_ms`: of the job, its log and its result. `keep_ms`: how long a request
    for a job that runs, or is not known yet, is stored; empty stores none. `call_id` is stored with the jobs that the
    call ends, so that a resent one recognizes them."""
    return [job_id, *lives_ms, keep_ms, call_id]
