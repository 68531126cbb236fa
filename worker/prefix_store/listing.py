"""What a folder holds, for people: prefixes rather than files. Needs no worker, and no lock."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from worker.prefix_store.encryption import Encryption
from worker.prefix_store.folder import Folder
from worker.prefix_store.format import BadFile, read_file_header
from worker.prefix_store.names import FileName, pin_of
from worker.prefix_store.records.hits import read_hits
from worker.prefix_store.records.memory import SegmentUse, joined, read_memory
from worker.prefix_store.records.models import outdated_digests, read_records
from worker.prefix_store.scan import scan_folder

_ID_LENGTH = 12


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The files along one prefix that no other file continues."""

    files: tuple[FileName, ...]  # in order; the first ones may be shared with other prefixes
    nbytes: int  # of these files
    used_s: float  # Unix time of the last use
    pinned: bool  # the last file is not removed for space
    complete: bool  # False if files before the first one are missing, so that it is found only while memory holds them
    hits: int  # how often its most read file was read from disk
    held: SegmentUse  # by running workers, in memory

    @property
    def id(self) -> str:
        """First digits of the digest of its tokens."""
        return self.files[-1].digest[:_ID_LENGTH]

    @property
    def model(self) -> str:
        """First digits of the digest of the model."""
        return self.files[-1].model[:_ID_LENGTH]

    @property
    def tokens(self) -> int:
        """Tokens from the start of the prompt to the end of the last file."""
        return self.files[-1].end


@dataclass(frozen=True, slots=True)
class _Written:
    """What the last file of a prefix says about itself."""

    tenant: str  # empty if it has none
    created_s: float  # Unix time


class Listing:
    """The prefixes in a folder at one time."""

    def __init__(self, path: Path, encryption: Encryption | None = None) -> None:
        """Read the folder. `encryption`: opens the headers of encrypted files. Raises OSError if there is no folder."""
        path.stat()
        self._folder = Folder(path, 0)
        self._encryption = encryption
        self._scan = scan_folder(path)
        self._outdated = outdated_digests(read_records(path, self._scan.models))
        self._memory = read_memory(path, self._scan.memory)
        self._hits = {model: read_hits(path, model) for model in {name.model for name in self._scan.names}}
        self._written = dict[FileName, _Written | None]()

    @property
    def nbytes(self) -> int:
        """Bytes of all files, also those of others."""
        return self._scan.nbytes

    @property
    def memory_bytes(self) -> int:
        """Bytes that running workers hold in memory, also of prefixes that are not on disk."""
        return self._memory.nbytes

    @property
    def stale(self) -> tuple[str, ...]:
        """Files of other versions of the store, by path relative to the folder."""
        return self._scan.stale

    @property
    def prefixes(self) -> list[StoredPrefix]:
        """All prefixes, the most recently used first."""
        continued = {(name.model, name.parent) for name in self._scan.names if name.start}
        last = (name for name in self._scan.names if (name.model, name.digest) not in continued)
        before = _by_digest(self._scan.names)
        found = [self._prefix([*_chain(name, before)][::-1]) for name in last]
        return sorted(found, key=lambda prefix: -prefix.used_s)

    def _prefix(self, files: list[FileName]) -> StoredPrefix:
        stored = [self._scan.files[str(name)] for name in files]
        held = (self._memory.segments.get((name.model, name.digest), SegmentUse()) for name in files)
        return StoredPrefix(
            tuple(files),
            sum(file.nbytes for file in stored),
            max(file.used_s for file in stored),
            pinned=not stored[-1].removable,
            complete=files[0].start == 0,
            hits=max(self._hits[name.model].get(name.digest, 0) for name in files),
            held=joined(held),
        )

    def tenant(self, prefix: StoredPrefix) -> str | None:
        """Return the namespace of a prefix, which is its tenant, and empty if it has none or is gone; None if its file
        cannot be read or decrypted."""
        try:
            written = self._written_of(prefix)
        except FileNotFoundError:
            return ""
        return written.tenant if written else None

    def created_s(self, prefix: StoredPrefix) -> float | None:
        """Return the Unix time at which the last file of a prefix was written; None if it is gone, or cannot be read or
        decrypted."""
        try:
            written = self._written_of(prefix)
        except FileNotFoundError:
            return None
        return written.created_s if written else None

    def _written_of(self, prefix: StoredPrefix) -> _Written | None:
        """Return what the last file of a prefix says; None if it cannot be read or decrypted. Raises
        FileNotFoundError."""
        name = prefix.files[-1]
        if name not in self._written:
            self._written[name] = self._read(name)
        return self._written[name]

    def _read(self, name: FileName) -> _Written | None:
        for encryption in {self._encryption, None}:  # workers with and without a key may share the folder
            try:
                header = read_file_header(self._folder.path / str(name), name, encryption)
                return _Written(header.namespace, header.created_s)
            except FileNotFoundError:
                raise
            except (BadFile, OSError):
                continue
        return None

    def is_outdated(self, prefix: StoredPrefix) -> bool:
        """Return True if workers have used other weights, or another library, for the same model since."""
        return prefix.files[-1].model in self._outdated

    def pin(self, prefix: StoredPrefix) -> None:
        """Keep a prefix from being removed for space. Raises OSError."""
        for name in prefix.files:
            (self._folder.path / name.pin).touch(mode=0o600)

    def unpin(self, prefix: StoredPrefix) -> None:
        """Let a prefix be removed for space again, but not the files that it shares with another pinned one. Raises
        OSError."""
        others = (each for each in self.prefixes if each.pinned and each.files != prefix.files)
        kept = {name for each in others for name in each.files}
        for name in prefix.files:
            if name not in kept:
                (self._folder.path / name.pin).unlink(missing_ok=True)

    def drop(self, prefixes: Iterable[StoredPrefix]) -> int:
        """Remove these prefixes, except for the files that others share. Returns the number of files removed. A worker
        stops to use them within seconds; what it holds in memory is not affected."""
        dropped = [*prefixes]
        kept = {name for each in self.prefixes if each not in dropped for name in each.files}
        names = {name for each in dropped for name in each.files} - kept
        segments = {(name.model, name.digest) for name in names}
        # A segment may have two files, without the state and with it.
        names.update(name for name in self._scan.names if (name.model, name.digest) in segments)
        for name in names:
            self._folder.remove(name)
        return len(names)

    def drop_stale(self) -> int:
        """Remove the files of other versions of the store, with their pins. Returns their number."""
        for name in self.stale:
            for each in (name, pin_of(name)):
                (self._folder.path / each).unlink(missing_ok=True)
        return len(self.stale)


def _by_digest(names: Iterable[FileName]) -> dict[tuple[str, str], FileName]:
    """Return a file for each segment, by the digests of model and tokens; of several, one with a state."""
    segments = defaultdict[tuple[str, str], list[FileName]](list)
    for name in names:
        segments[name.model, name.digest].append(name)
    return {digests: max(files, key=lambda name: (name.has_state, -name.start)) for digests, files in segments.items()}


def _chain(name: FileName, before: dict[tuple[str, str], FileName]) -> Iterator[FileName]:
    """Yield the file and those before it, the last first."""
    current: FileName | None = name
    while current is not None:
        yield current
        previous = before.get((current.model, current.parent)) if current.start else None
        # Without the check of the positions, bad names could continue each other in a circle.
        current = previous if previous and previous.end == current.start else None
