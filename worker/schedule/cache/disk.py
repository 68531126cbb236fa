"""Decisions of the disk tier of the prefix cache: what to load, what to write and what to remove."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_MIN_TOKENS = 32  # a shorter prefix is computed in about one forward
_LATENCY_S = 0.002  # of a file: opening it, its header, handing it over
_MIN_LIMIT_S = 0.5  # a shorter delay of the reader is no sign that the folder hangs
_USES_FOR_EARLY_WRITE = 2  # a prefix used this often is likely to be used again

T = TypeVar("T")


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


def writes_early(uses: int) -> bool:
    """Return True if a prefix is to be written now, while it is in memory. It is True for one number of uses only, so
    each prefix is written once."""
    return uses == _USES_FOR_EARLY_WRITE


def fits_budget(nbytes: int, written_bytes: int, max_bytes: int | None) -> bool:
    """Return True if a file may be written today. `written_bytes`: written today; `max_bytes`: of a day."""
    return max_bytes is None or written_bytes + nbytes <= max_bytes


def load_limit_s(
    tokens: int, file_bytes: Sequence[int], *, bytes_per_s: float, compute_s: float, waiting_bytes: int = 0
) -> float | None:
    """Return the seconds after which a load is given up; None if it should not begin, since computing is expected to
    be as fast. `tokens`: those that need not be computed; `file_bytes`: the size of each file; `bytes_per_s`: measured
    speed of reading; `compute_s`: expected time of computing these tokens; `waiting_bytes`: read before these files."""
    load_s = len(file_bytes) * _LATENCY_S + (sum(file_bytes) + waiting_bytes) / max(bytes_per_s, 1.0)
    if tokens < _MIN_TOKENS or load_s >= compute_s:
        return None
    return max(compute_s, _MIN_LIMIT_S)
