"""Records in the folder of what running workers hold in memory. They name only prefixes that are on disk too."""

import json
import os
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from worker.prefix_store.files.names import TokenDigest, held_model, memory_record
from worker.prefix_store.folder.scan import Scan
from worker.prefix_store.records.usage import is_count, read_record, write_record

_STALE_S = 15.0  # a running worker renews its record more often than this


@dataclass(frozen=True, slots=True)
class HeldNode:
    """A part of a prefix in memory."""

    parent: int | None  # index of the part before it, which comes first; None: it begins the prompt
    namespace: str
    tokens: tuple[int, ...]
    nbytes: int
    uses: int  # number of requests that have shared it, after the first


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker holds in memory."""

    nbytes: int = 0  # of all prefixes
    nodes: tuple[HeldNode, ...] = ()  # the most recently used


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """A segment that is on disk, in memory."""

    nbytes: int = 0  # from the end of the segment before it that is on disk
    uses: int = 0


def joined(parts: Iterable[SegmentUse]) -> SegmentUse:
    """Return the use of the segments of a prefix together: their bytes, and the uses of the most used."""
    found = [*parts]
    return SegmentUse(sum(each.nbytes for each in found), max((each.uses for each in found), default=0))


class MemoryRecord:
    """What this worker holds. `hold` is for any thread."""

    def __init__(self, model: str, digest_key: bytes) -> None:
        """`model`: digest of the model. `digest_key`: of the digests of tokens."""
        self._model = model
        self._name = memory_record(model, secrets.token_hex(8))
        self._held: Held | None = None
        self._digests = _Digests(model, digest_key)
        self._recorded: tuple[Held, Collection[str]] | None = None  # with the digests of stored segments

    def hold(self, held: Held) -> None:
        """Record this from the next renewal on."""
        self._held = held

    def renew(self, folder: Path, scan: Scan, room_bytes: int) -> dict[str, int]:
        """Write the record, and remove those of workers that have died: see `UsageRecord`."""
        dead = [each for each in scan.memory if each != self._name and not _is_fresh(folder / each)]
        for each in dead:
            (folder / each).unlink(missing_ok=True)
        return dict.fromkeys(dead, 0) | self._write(folder, scan, room_bytes)

    def _write(self, folder: Path, scan: Scan, room_bytes: int) -> dict[str, int]:
        held, path = self._held, folder / self._name
        if held is None:
            return {}
        stored = {name.digest for name in scan.names if name.model == self._model}
        if (held, stored) == self._recorded:
            with suppress(FileNotFoundError):
                os.utime(path)
                return {}
        uses = _segment_uses(held.nodes, self._digests.of(held.nodes), stored)
        segments = {digest: [use.nbytes, use.uses] for digest, use in uses.items()}
        if not write_record(path, json.dumps({"bytes": held.nbytes, "segments": segments}), room_bytes):
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
        return abs(time.time() - path.stat().st_mtime) <= _STALE_S
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What all running workers hold together."""

    nbytes: int
    segments: Mapping[tuple[str, str], SegmentUse]  # by the digests of model and tokens


def read_memory(folder: Path, names: Iterable[str]) -> MemoryUse:
    """Return what the records of these names say, without those of workers that have died, and without damaged ones."""
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
    return MemoryUse(total, segments)
