"""Records in the folder of the model that each digest stands for, so that outdated prefixes are recognized."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from worker.prefix_store.files.names import model_record
from worker.prefix_store.records.usage import write_record

_RENEWED_S = 60.0  # running workers renew their records more often than this


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
    return frozenset(each.digest for each in known if last[each.label, each.encrypted] - each.used_s > _RENEWED_S)
