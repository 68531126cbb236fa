"""Content of the folder at one time: its files, their sizes, and which of them may be removed or are pinned.

Pins are small files beside the files of prefixes that are never removed for space. Each file of a pinned prefix has
one, so that none is removed while others are written. That of the last file is not empty: the prefix ends there, also
if files of another one follow. Earlier versions have left all pins empty; of those, the end of the longest pinned
prefix counts."""

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from worker.prefix_store.names import (
    LOCK,
    WRITTEN,
    FileName,
    chain_to,
    counted_model,
    file_of_each_segment,
    held_model,
    is_ours,
    is_pin,
    is_temporary_file,
    parse_name,
    pin_of,
    pinned_name,
    recorded_model,
)
from worker.prefix_store.policy import StoredFile

_END = "end\n"


@dataclass(frozen=True, slots=True)
class Scan:
    """Content of the folder."""

    files: dict[str, StoredFile[str]]  # by path relative to the folder
    unfinished: tuple[str, ...]  # files that are being written, or whose writers have died
    lone_pins: tuple[str, ...]  # pins without a file
    names: tuple[FileName, ...]  # files of this version, of all models
    stale: tuple[str, ...] = ()  # files of other versions
    models: tuple[str, ...] = ()  # digests that have a record
    memory: tuple[str, ...] = ()  # files that say what workers hold in memory
    pinned_ends: tuple[FileName, ...] = ()  # last files of the prefixes that were pinned when the folder was listed

    @property
    def nbytes(self) -> int:
        """Bytes of all files, unfinished ones included."""
        return sum(file.nbytes for file in self.files.values())

    def without(self, keys: Collection[str]) -> "Scan":
        """Return the scan without these files, which were removed."""
        return replace(
            self,
            files={key: file for key, file in self.files.items() if key not in keys},
            unfinished=tuple(each for each in self.unfinished if each not in keys),
            lone_pins=tuple(each for each in self.lone_pins if each not in keys),
            names=tuple(name for name in self.names if str(name) not in keys),
        )

    def with_unfinished(self, key: str, nbytes: int) -> "Scan":
        """Return the scan with a file of `nbytes` bytes that is being written now."""
        file = StoredFile(key, nbytes, 0.0, removable=False)
        return replace(self, files={**self.files, key: file}, unfinished=(*self.unfinished, key))

    def with_file(self, name: FileName, nbytes: int, *, pinned: bool) -> "Scan":
        """Return the scan with a file that was written now."""
        file = StoredFile(str(name), nbytes, time.time(), name.end, removable=not pinned)
        others = tuple(each for each in self.names if each != name)
        return replace(self, files={**self.files, str(name): file}, names=(*others, name))

    def with_sizes(self, sizes: Mapping[str, int]) -> "Scan":
        """Return the scan with the sizes of records that were written now; 0 if there is none."""
        records = {key: StoredFile(key, nbytes, 0.0, removable=False) for key, nbytes in sizes.items() if nbytes}
        files = {key: file for key, file in self.files.items() if key not in sizes}
        return replace(self, files={**files, **records})

    def with_pin(self, name: FileName) -> "Scan":
        """Return the scan with a file that was pinned now."""
        key = str(name)
        if key not in self.files:
            return self
        return replace(self, files={**self.files, key: replace(self.files[key], removable=False)})


def scan_folder(folder: Path) -> Scan:
    """List the folder, and what is in folders in it. Opens no file. Raises OSError if the folder cannot be listed."""
    files = dict[str, StoredFile[str]]()
    unfinished, names = list[str](), list[FileName]()
    stale, models = list[str](), list[str]()
    memory = list[str]()
    pins = dict[str, int]()  # bytes, by the name of the pinned file
    for relative, stat in _walk(folder):
        name = parse_name(relative)
        if is_pin(relative):
            pins[pinned_name(relative)] = stat.st_size
        if is_temporary_file(relative):
            unfinished.append(relative)
        if name:
            names.append(name)
        if model := recorded_model(relative):
            models.append(model)
        if held_model(relative):
            memory.append(relative)
        is_record = model or held_model(relative) or counted_model(relative) or relative in (LOCK, WRITTEN)
        known = name or is_record or is_pin(relative) or is_temporary_file(relative)
        is_stale = is_ours(relative) and not known
        if is_stale:
            stale.append(relative)
        used_s = stat.st_mtime if name else 0.0  # stale files first
        files[relative] = StoredFile(relative, stat.st_size, used_s, name.end if name else 0, bool(name) or is_stale)
    ends = pinned_ends(names, pins)
    for key in {*pins, *map(str, files_of_pinned(ends, names))} & files.keys():
        files[key] = replace(files[key], removable=False)
    lone_pins = tuple(map(pin_of, pins.keys() - files.keys()))
    return Scan(files, tuple(unfinished), lone_pins, tuple(names), tuple(stale), tuple(models), tuple(memory), ends)


def _walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all files, by path relative to the folder. Files that disappear meanwhile are left out, and so are folders
    in it that cannot be listed; links are not followed."""
    folders = [""]
    while folders:
        prefix = folders.pop()
        try:
            entries = [*os.scandir(folder / prefix)]
        except OSError:
            if not prefix:
                raise
            continue
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{relative}/")
                elif entry.is_file(follow_symlinks=False):
                    yield relative, entry.stat(follow_symlinks=False)


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
