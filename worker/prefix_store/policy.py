"""Decisions about prefixes on disk: what to load, what to write and what to remove."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from worker.outcomes import NotStored, StoreResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadSize:
    """A load that could begin now."""

    tokens: int  # that need not be computed then
    start: int  # tokens before them
    file_bytes: tuple[int, ...]
    bytes_per_s: float  # measured speed of reading
    waiting_bytes: int = 0  # of the loads that have begun, and come before this one


# Returns the seconds after which the load is given up; None if it should not begin.
LoadLimit = Callable[[LoadSize], float | None]


@dataclass(frozen=True, slots=True)
class StoredFile(Generic[T]):
    """A file in the folder, as far as its removal depends on it."""

    key: T
    nbytes: int
    used_s: float  # time of the last use
    end: int = 0  # tokens of the prefix, up to the end of this file
    removable: bool = True  # False for files of others, and for pinned ones


def files_to_remove(files: Iterable[StoredFile[T]], excess_bytes: int) -> list[T]:
    """Return the files to remove to free `excess_bytes`: the least recently used first, and of one prefix the end
    first, since files after a gap are useless. Fewer bytes are freed if the other files cannot be removed."""
    removed = list[T]()
    for file in sorted((file for file in files if file.removable), key=lambda file: (file.used_s, -file.end)):
        if excess_bytes <= 0:
            break
        removed.append(file.key)
        excess_bytes -= file.nbytes
    return removed


def writes_early(uses: int, *, handed_over: bool) -> bool:
    """Return True if a part of a prefix is to be written now, while it is in memory. `handed_over`: it was before, so
    it is not written again."""
    return uses >= 2 and not handed_over  # a prefix used this often is likely to be used again


def fits_budget(nbytes: int, written_bytes: int, max_bytes: int | None) -> bool:
    """Return True if a file may be written today. `written_bytes`: written today; `max_bytes`: of a day."""
    return max_bytes is None or written_bytes + nbytes <= max_bytes


def store_result(
    tokens: int, on_disk: int, written_bytes: int, refusal: NotStored | None, *, spacing: int
) -> StoreResult:
    """Return the result for a prefix of `tokens` tokens, of which `on_disk` are found on disk. `refusal`: why a part of
    it was not written. `spacing`: a prefix that is shorter by fewer tokens than this counts as whole."""
    if on_disk > 0 and tokens - on_disk < spacing:
        return StoreResult(on_disk, written_bytes)
    if refusal is None:
        refusal = NotStored.TOO_SHORT if tokens < spacing else NotStored.NOT_CACHED
    return StoreResult(on_disk, written_bytes, refusal)


def load_limit_s(load: LoadSize, compute_s: float, *, min_tokens: int = 32) -> float | None:
    """Return the seconds after which a load is given up; None if it should not begin, since computing is expected to
    be as fast. `compute_s`: expected time of computing the tokens. `min_tokens`: fewer are computed, in about one
    forward."""
    latency_s = 0.002 * len(load.file_bytes)  # opening a file, its header, handing it over
    read_s = (sum(load.file_bytes) + load.waiting_bytes) / max(load.bytes_per_s, 1.0)
    if load.tokens < min_tokens or latency_s + read_s >= compute_s:
        return None
    return max(compute_s, 0.5)  # a shorter delay of the reader is no sign that the folder hangs
