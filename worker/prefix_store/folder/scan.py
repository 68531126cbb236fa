"""Content of the folder at one time: its files, their sizes, and which of them may be removed."""

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from worker.prefix_store.files.names import (
    LOCK,
    WRITTEN,
    FileName,
    counted_model,
    held_model,
    is_ours,
    is_pin,
    is_temporary,
    parse_name,
    pin_of,
    pinned_name,
    recorded_model,
)
from worker.prefix_store.policy import StoredFile
from worker.prefix_store.records.pins import files_of_pinned, pinned_ends


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
        if is_temporary(relative):
            unfinished.append(relative)
        if name:
            names.append(name)
        if model := recorded_model(relative):
            models.append(model)
        if held_model(relative):
            memory.append(relative)
        is_record = model or held_model(relative) or counted_model(relative) or relative in (LOCK, WRITTEN)
        known = name or is_record or is_pin(relative) or is_temporary(relative)
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
