"""Pins: small files beside the files of prefixes that are never removed for space.

Each file of a pinned prefix has one, so that none is removed while others are written. That of the last file is not
empty: the prefix ends there, also if files of another one follow. Earlier versions have left all pins empty; of those,
the end of the longest pinned prefix counts."""

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from worker.prefix_store.files.names import FileName, chain_to, file_of_each_segment

_END = "end\n"


def write_pin(folder: Path, name: FileName, *, is_end: bool) -> None:
    """Pin a file. `is_end`: a pinned prefix ends with it; it stays the end of one otherwise. Raises OSError."""
    path = folder / name.pin
    path.touch(mode=0o600)
    if is_end:
        path.write_text(_END, "utf-8")


def copy_pin(folder: Path, name: FileName, to: FileName) -> bool:
    """Pin a file like the one that it replaces. Returns False if that one is not pinned. Raises OSError."""
    try:
        is_end = (folder / name.pin).stat().st_size > 0
    except FileNotFoundError:
        return False
    write_pin(folder, to, is_end=is_end)
    return True


def clear_end(folder: Path, name: FileName) -> None:
    """Let no pinned prefix end with this file, which stays pinned if it is. Raises OSError."""
    with suppress(FileNotFoundError):
        os.truncate(folder / name.pin, 0)


def pinned_ends(names: Iterable[FileName], pins: Mapping[str, int]) -> tuple[FileName, ...]:
    """Return the last file of each pinned prefix. `pins`: bytes of the pins, by the names of the pinned files."""
    pinned = [name for name in names if str(name) in pins]
    continued = {(name.model, name.parent) for name in pinned if name.start}
    return tuple(name for name in pinned if pins[str(name)] or name.segment not in continued)


def files_of_pinned(ends: Collection[FileName], names: Iterable[FileName]) -> set[FileName]:
    """Return the files of pinned prefixes, those without a pin of their own included. `ends`: their last files."""
    files = file_of_each_segment(names) if ends else {}
    return {each for end in ends for each in chain_to(end, files)}
