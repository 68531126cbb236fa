"""Record in the folder of how often the segments of a model are read from disk, by all workers together."""

import heapq
import json
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from threading import Lock

from worker.prefix_store.files.names import FileName, hits_record
from worker.prefix_store.folder.scan import Scan
from worker.prefix_store.records.usage import is_count, read_record, write_record

_MAX_ENTRIES = 4096  # about 150 kB


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
        """Add the new reads, and drop the entries of segments without a file: see `UsageRecord`."""
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
