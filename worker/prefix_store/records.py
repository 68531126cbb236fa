"""Records: small files of workers in the folder, for `sluice prefix`: models, reads, and what memory holds.

They are written as a whole, and damaged ones count as empty."""

import heapq
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from worker.prefix_store.names import (
    TEMPORARY,
    FileName,
    TokenDigest,
    held_model,
    hits_record,
    memory_record,
    model_record,
)
from worker.prefix_store.scan import Scan

_MAX_ENTRIES = 4096  # about 150 kB


def write_record(path: Path, content: str, room_bytes: int | None = None) -> bool:
    """Write a record as a whole, readable by its owner only. Returns False, and leaves it as it was, if it grows by
    more than `room_bytes`; None: no limit. Raises OSError."""
    if room_bytes is not None:
        with suppress(FileNotFoundError):
            room_bytes += path.stat().st_size
        if len(content.encode()) > room_bytes:
            return False
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    temporary.touch(mode=0o600)
    temporary.write_text(content, "utf-8")
    temporary.rename(path)
    return True


def read_record(path: Path) -> dict[str, Any]:
    """Return the content of a record; an empty one if it is missing, damaged or cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= 1 << 20:  # a larger file is none of ours
            content = json.loads(path.read_text("utf-8"))
            return content if isinstance(content, dict) else {}
    return {}


def is_count(value: object) -> bool:
    """Return True for a number of bytes, hits or uses, as JSON gives it."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model that a worker has used with the folder."""

    digest: str  # of its fingerprint; part of the files' names
    label: str  # name by which people know it, the same if its weights or its library change
    encrypted: bool  # its files are encrypted
    used_s: float = 0.0  # Unix time of the last use by a worker

    def renew(self, folder: Path) -> None:
        """Write the record, or mark it as used now. Requires the folder's lock. Raises OSError."""
        path = folder / model_record(self.digest)
        content = json.dumps({"model": self.label, "encrypted": self.encrypted})
        with suppress(FileNotFoundError):
            # Earlier versions let others read it.
            if path.read_text("utf-8") == content and not path.stat().st_mode & 0o077:
                os.utime(path)
                return
        write_record(path, content)


def read_records(folder: Path, digests: Iterable[str]) -> list[ModelRecord]:
    """Return the records of these digests, except for those that cannot be read."""
    records = list[ModelRecord]()
    for digest in digests:
        path = folder / model_record(digest)
        with suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads(path.read_text("utf-8"))
            records.append(ModelRecord(digest, str(raw["model"]), bool(raw["encrypted"]), path.stat().st_mtime))
    return records


def outdated_digests(records: Iterable[ModelRecord]) -> frozenset[str]:
    """Return the digests of models that another of the same label has replaced: workers have used that one since, and
    not this one. Plain and encrypted files are compared among themselves, since workers with and without a key may
    take turns."""
    known = [*records]
    last = dict[tuple[str, bool], float]()
    for each in known:
        last[each.label, each.encrypted] = max(each.used_s, last.get((each.label, each.encrypted), 0.0))
    renewed_s = 60.0  # running workers renew their records more often than this
    return frozenset(each.digest for each in known if last[each.label, each.encrypted] - each.used_s > renewed_s)


# A worker keeps two records of the use of prefixes. `renew` brings one up to date, if it grows by `room_bytes` at most,
# and returns the bytes of each file that has changed, 0 if it was removed. `end` leaves it as it is to be while the
# worker does not run. Both require the folder's lock, and raise OSError.


class HitRecord:
    """Counts the reads of this worker, and adds them to the record. `add` is for any thread."""

    def __init__(self, model: str) -> None:
        """`model`: digest of the model."""
        self._model = model
        self._new = Counter[str]()
        self._lock = Lock()

    def add(self, name: FileName) -> None:
        """Count a read of a file. Its segment keeps the count if another file replaces it."""
        with self._lock:
            self._new[name.digest] += 1

    def renew(self, folder: Path, scan: Scan, room_bytes: int) -> dict[str, int]:
        """Add the new reads, and drop the entries of segments without a file."""
        if not self._new:
            return {}
        return self._write(folder, {name.digest for name in scan.names if name.model == self._model}, room_bytes)

    def end(self, folder: Path, room_bytes: int) -> None:
        """Add the new reads."""
        if self._new:
            self._write(folder, None, room_bytes)

    def _write(self, folder: Path, present: Collection[str] | None, room_bytes: int) -> dict[str, int]:
        """Write the record. `present`: digests of the segments that have a file; None: all."""
        path = folder / hits_record(self._model)
        with self._lock:
            new = self._new.copy()
        content = json.dumps(_merged(new, read_hits(folder, self._model), present))
        if not write_record(path, content, room_bytes):
            return {}
        with self._lock:
            self._new -= new
        return {path.name: path.stat().st_size}


def _merged(new: Mapping[str, int], known: Mapping[str, int], present: Collection[str] | None) -> dict[str, int]:
    """Return the sums, of those that were read last or most often."""
    sums = Counter(new)
    sums.update(known)
    kept = {digest: hits for digest, hits in sums.items() if present is None or digest in present}
    most = heapq.nlargest(_MAX_ENTRIES, kept, key=lambda digest: (digest in new, kept[digest]))
    return {digest: kept[digest] for digest in most}


def read_hits(folder: Path, model: str) -> dict[str, int]:
    """Return how often each segment of a model was read, by its digest. Damaged entries are left out."""
    return {digest: hits for digest, hits in read_record(folder / hits_record(model)).items() if is_count(hits)}


@dataclass(frozen=True, slots=True)
class HeldNode:
    """A part of a prefix in memory."""

    parent: int | None  # index of the part before it, which comes first; None: it begins the prompt
    namespace: str
    tokens: tuple[int, ...]
    nbytes: int
    uses: int  # number of requests that have shared it, after the first


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """A segment that is on disk, in memory."""

    nbytes: int = 0  # from the end of the segment before it that is on disk
    uses: int = 0


def total_use(parts: Iterable[SegmentUse]) -> SegmentUse:
    """Return the use of the segments of a prefix together: their bytes, and the uses of the most used."""
    found = [*parts]
    return SegmentUse(sum(each.nbytes for each in found), max((each.uses for each in found), default=0))


class MemoryRecord:
    """What this worker holds. `show` is for any thread."""

    def __init__(self, model: str, digest_key: bytes) -> None:
        """`model`: digest of the model. `digest_key`: of the digests of tokens."""
        self._model = model
        self._name = memory_record(model, secrets.token_hex(8))
        self._held: tuple[int, tuple[HeldNode, ...]] | None = None  # as `show` got it
        self._digests = _Digests(model, digest_key)
        self._recorded: object = None  # what is held, with the digests of stored segments

    def show(self, nbytes: int, nodes: tuple[HeldNode, ...]) -> None:
        """Let people see this from the next renewal on. `nbytes`: of all prefixes. `nodes`: the most recently used."""
        self._held = nbytes, nodes

    def renew(self, folder: Path, scan: Scan, room_bytes: int) -> dict[str, int]:
        """Write the record, and remove those of workers that have died."""
        dead = [each for each in scan.memory if each != self._name and not _is_fresh(folder / each)]
        for each in dead:
            (folder / each).unlink(missing_ok=True)
        return dict.fromkeys(dead, 0) | self._write(folder, scan, room_bytes)

    def _write(self, folder: Path, scan: Scan, room_bytes: int) -> dict[str, int]:
        held, path = self._held, folder / self._name
        if held is None:
            return {}
        held_bytes, nodes = held
        stored = {name.digest for name in scan.names if name.model == self._model}
        if (held, stored) == self._recorded:
            with suppress(FileNotFoundError):
                os.utime(path)
                return {}
        uses = _segment_uses(nodes, self._digests.of(nodes), stored)
        segments = {digest: [use.nbytes, use.uses] for digest, use in uses.items()}
        if not write_record(path, json.dumps({"bytes": held_bytes, "segments": segments}), room_bytes):
            return {}
        self._recorded = held, stored
        return {self._name: path.stat().st_size}

    def end(self, folder: Path, room_bytes: int) -> None:
        """Remove the record."""
        self._held = None
        (folder / self._name).unlink(missing_ok=True)


class _Digests:
    """Digests of the tokens up to the end of each node. Only nodes that were not there the last time are hashed."""

    def __init__(self, model: str, key: bytes) -> None:
        self._model, self._key = model, key
        self._known: dict[tuple[str, int], tuple[tuple[int, ...], TokenDigest]] = {}

    def of(self, nodes: Iterable[HeldNode]) -> list[str]:
        """Return the digest of each node."""
        digests = list[TokenDigest]()
        known = dict[tuple[str, int], tuple[tuple[int, ...], TokenDigest]]()
        for node in nodes:
            before = digests[node.parent] if node.parent is not None else self._empty(node.namespace)
            key = before.hexdigest(), id(node.tokens)  # no other tokens have this id while they are kept here
            known[key] = self._known.get(key) or (node.tokens, _continued(before, node.tokens))
            digests.append(known[key][1])
        self._known = known
        return [digest.hexdigest() for digest in digests]

    def _empty(self, namespace: str) -> TokenDigest:
        return TokenDigest(self._model, namespace, self._key)


def _continued(digest: TokenDigest, tokens: tuple[int, ...]) -> TokenDigest:
    continued = digest.copy()
    continued.update(tokens)
    return continued


def _segment_uses(nodes: Iterable[HeldNode], digests: Iterable[str], stored: Collection[str]) -> dict[str, SegmentUse]:
    """Return the use of each node that ends where a stored segment does, with the nodes before it that do not."""
    unstored = list[int]()  # bytes since the last stored segment, by node
    uses = dict[str, SegmentUse]()
    for node, digest in zip(nodes, digests, strict=True):
        nbytes = node.nbytes + (unstored[node.parent] if node.parent is not None else 0)
        if digest in stored:
            uses[digest] = SegmentUse(nbytes, node.uses)
        unstored.append(0 if digest in stored else nbytes)
    return uses


def _is_fresh(path: Path) -> bool:
    try:
        return abs(time.time() - path.stat().st_mtime) <= 15.0  # a running worker renews its record more often
    except OSError:
        return False


def read_memory(folder: Path, names: Iterable[str]) -> tuple[int, dict[tuple[str, str], SegmentUse]]:
    """Return the bytes that all running workers hold together, and the use of each segment by the digests of model and
    tokens, as the records of these names say. Those of workers that have died, and damaged ones, are left out."""
    total, segments = 0, dict[tuple[str, str], SegmentUse]()
    for name in names:
        record = read_record(folder / name) if _is_fresh(folder / name) else {}
        total += nbytes if is_count(nbytes := record.get("bytes", 0)) else 0
        parts = record.get("segments")
        for digest, use in parts.items() if isinstance(parts, dict) else ():
            if isinstance(use, list) and len(use) == 2 and all(map(is_count, use)):
                key = held_model(name) or "", digest
                known = segments.get(key, SegmentUse())
                segments[key] = SegmentUse(known.nbytes + use[0], known.uses + use[1])
    return total, segments
