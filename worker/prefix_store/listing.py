"""What a folder holds, for people: prefixes rather than files. Needs no worker, and no lock."""

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worker.prefix_store.encryption import Encryption
from worker.prefix_store.folder import Folder
from worker.prefix_store.format import BadFile, read_file_header
from worker.prefix_store.names import IMAGE_FEATURES, FileName, chain_to, file_of_each_segment, pin_of
from worker.prefix_store.records import SegmentUse, outdated_digests, read_hits, read_memory, read_records, total_use
from worker.prefix_store.scan import clear_end, scan_folder, write_pin


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The files along one prefix that no other file continues, or that is pinned."""

    files: tuple[FileName, ...]  # in order; the first ones may be shared with other prefixes
    nbytes: int  # of these files
    used_s: float  # Unix time of the last use of the last file
    pinned: bool  # its files are not removed for space
    complete: bool  # False if files before the first one are missing, so that it is found only while memory holds them
    hits: int  # how often its most read file was read from disk
    held: SegmentUse  # by running workers, in memory

    @property
    def id(self) -> str:
        """First 12 digits of the digest of its tokens."""
        return self.files[-1].digest[:12]

    @property
    def model(self) -> str:
        """First 12 digits of the digest of the model."""
        return self.files[-1].model[:12]

    @property
    def tokens(self) -> int:
        """Tokens from the start of the prompt to the end of the last file."""
        return self.files[-1].end


@dataclass(frozen=True, slots=True)
class _Dropped:
    """What became of the files of prefixes that were dropped."""

    removed: int  # files
    kept: int  # files that stay, since other prefixes share them
    pinned: int  # of these, files of pinned prefixes
    failed: tuple[str, ...] = ()  # names of files that could not be removed


@dataclass(frozen=True, slots=True)
class _FileContent:
    """What a file says about itself."""

    tenant: str  # empty if it has none
    kind: Literal["prefix", "image"]  # image: the features of an image
    created_s: float  # Unix time


class Listing:
    """The prefixes in a folder at one time."""

    def __init__(self, path: Path, encryption: Encryption | None = None) -> None:
        """Read the folder. `encryption`: opens the headers of encrypted files. Raises OSError if there is no folder."""
        path.stat()
        self._folder = Folder(path, 0)
        self._encryption = encryption
        self._scan = scan_folder(path)
        records = read_records(path, self._scan.models)
        self._model_names = {record.digest: record.label for record in records}
        self._outdated = outdated_digests(records)
        # Bytes that workers hold in memory, also of prefixes that are not on disk.
        self.memory_bytes, self._held = read_memory(path, self._scan.memory)
        self._hits = {model: read_hits(path, model) for model in {name.model for name in self._scan.names}}
        self._contents = dict[FileName, _FileContent | None]()
        self.nbytes = self._scan.nbytes  # of all files, also those of others
        self.stale = self._scan.stale  # files of other versions of the store, by path relative to the folder

    @property
    def prefixes(self) -> list[StoredPrefix]:
        """All prefixes, the most recently used first. Of a pinned one that another continues, both are in the list."""
        continued = {(name.model, name.parent) for name in self._scan.names if name.start}
        pinned = {name.segment for name in self._scan.pinned_ends}
        files = file_of_each_segment(self._scan.names)
        last = (name for segment, name in files.items() if segment not in continued or segment in pinned)
        found = [self._prefix([*chain_to(name, files)][::-1], pinned=name.segment in pinned) for name in last]
        return sorted(found, key=lambda prefix: -prefix.used_s)

    def _prefix(self, files: list[FileName], *, pinned: bool) -> StoredPrefix:
        stored = [self._scan.files[str(name)] for name in files]
        held = (self._held.get((name.model, name.digest), SegmentUse()) for name in files)
        return StoredPrefix(
            tuple(files),
            sum(file.nbytes for file in stored),
            stored[-1].used_s,
            pinned,
            complete=files[0].start == 0,
            hits=max(self._hits[name.model].get(name.digest, 0) for name in files),
            held=total_use(held),
        )

    def tenant(self, prefix: StoredPrefix) -> str | None:
        """Return the namespace of a prefix, which is its tenant, and empty if it has none or is gone; None if its file
        cannot be read or decrypted."""
        try:
            content = self._content_of(prefix)
        except FileNotFoundError:
            return ""
        return content.tenant if content else None

    def content(self, prefix: StoredPrefix) -> _FileContent | None:
        """Return what the last file of a prefix says about itself; None if it is gone, or cannot be read or
        decrypted."""
        with suppress(FileNotFoundError):
            return self._content_of(prefix)
        return None

    def _content_of(self, prefix: StoredPrefix) -> _FileContent | None:
        """Return what the last file of a prefix says; None if it cannot be read or decrypted. Raises
        FileNotFoundError."""
        name = prefix.files[-1]
        if name not in self._contents:
            self._contents[name] = self._read(name)
        return self._contents[name]

    def _read(self, name: FileName) -> _FileContent | None:
        for encryption in {self._encryption, None}:  # workers with and without a key may share the folder
            try:
                header = read_file_header(self._folder.path / str(name), name, encryption)
                is_image = header.tokens[0] >= IMAGE_FEATURES
                return _FileContent(header.namespace, "image" if is_image else "prefix", header.created_s)
            except FileNotFoundError:
                raise
            except (BadFile, OSError):
                continue
        return None

    def model_name(self, prefix: StoredPrefix) -> str | None:
        """Return the name by which workers have loaded the model; None if they have not recorded it."""
        return self._model_names.get(prefix.files[-1].model)

    def is_outdated(self, prefix: StoredPrefix) -> bool:
        """Return True if workers have used other weights, or another library, for the same model since."""
        return prefix.files[-1].model in self._outdated

    def pin(self, prefix: StoredPrefix) -> None:
        """Keep a prefix from being removed for space. Raises OSError."""
        for name in prefix.files:
            write_pin(self._folder.path, name, is_end=name == prefix.files[-1])

    def unpin(self, prefix: StoredPrefix) -> None:
        """Let a pinned prefix be removed for space again, but not the files that it shares with another pinned one.
        Raises OSError."""
        self._end_pins([prefix])

    def _end_pins(self, ended: Collection[StoredPrefix]) -> None:
        """End the pins of these prefixes. Files of other pinned prefixes stay pinned."""
        kept = _segments(each for each in self.prefixes if each.pinned and each not in ended)
        for prefix in ended:
            for name in self._files_of({name.segment for name in prefix.files} - kept):
                (self._folder.path / name.pin).unlink(missing_ok=True)
            for name in self._files_of({prefix.files[-1].segment}):
                clear_end(self._folder.path, name)

    def drop(self, prefixes: Iterable[StoredPrefix]) -> _Dropped:
        """Remove these prefixes and their pins, except for the files that others share. A worker stops to use them
        within seconds; what it holds in memory is not affected. Raises OSError."""
        dropped = [*prefixes]
        others = [each for each in self.prefixes if each not in dropped]
        self._end_pins([each for each in dropped if each.pinned])
        segments, shared = _segments(dropped), _segments(others)
        pinned = _segments(each for each in others if each.pinned)
        names = self._files_of(segments - shared)
        failed = tuple(str(name) for name in names if not self._folder.remove(name))
        return _Dropped(len(names) - len(failed), len(segments & shared), len(segments & pinned), failed)

    def _files_of(self, segments: Collection[tuple[str, str]]) -> list[FileName]:
        """Return all files of these segments. One may have two, without the state and with it."""
        return [name for name in self._scan.names if name.segment in segments]

    def drop_stale(self) -> int:
        """Remove the files of other versions of the store, with their pins. Returns their number."""
        for name in self.stale:
            for each in (name, pin_of(name)):
                (self._folder.path / each).unlink(missing_ok=True)
        return len(self.stale)


def _segments(prefixes: Iterable[StoredPrefix]) -> set[tuple[str, str]]:
    return {name.segment for prefix in prefixes for name in prefix.files}
