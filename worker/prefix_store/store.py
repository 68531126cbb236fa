"""The store as the engine uses it: a thread that reads, one that writes, and the index between them."""

import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from worker.prefix_store.encryption import Encryption
from worker.prefix_store.folder import Folder
from worker.prefix_store.index import Chain, Index
from worker.prefix_store.names import model_digest
from worker.prefix_store.reader import Destination, Reader
from worker.prefix_store.records import HitRecord, MemoryRecord, ModelRecord
from worker.prefix_store.writer import Writer

logger = logging.getLogger("sluice.prefix_store")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of a store."""

    folder: Path
    max_bytes: int  # of all files in the folder
    daily_bytes: int | None = None  # written in a day; None: no limit
    max_pending_bytes: int = 256_000_000  # in memory, waiting to be written
    key: bytes | None = field(default=None, repr=False)  # of 32 bytes, to encrypt the files; None: they are plain
    label: str = ""  # name by which people know the model; empty: it is not recorded which prefixes are outdated


class PrefixStore:
    """Segments on disk of one model: the `index` of the files, the `reader`, the `writer`, and the record of what the
    worker holds in `memory`. All methods may be called on any thread, and only `open` and `close` wait for the disk.
    Prefixes that were encrypted with another key, or not at all, are not found."""

    def __init__(self, options: StoreOptions, fingerprint: str, destination: Destination | None = None) -> None:
        """`fingerprint`: of the model and of all that its caches depend on. `destination`: what files are read into;
        None: bytes. Raises OSError, and ImportError if there is a key and no library for it."""
        destination = destination or Destination()
        encryption = Encryption(options.key) if options.key else None
        digest_key = encryption.digest_key if encryption else b""
        model = model_digest(fingerprint, digest_key)
        record = ModelRecord(model, options.label, encrypted=encryption is not None) if options.label else None
        self.memory, hits = MemoryRecord(model, digest_key), HitRecord(model)
        usage = (hits, self.memory)
        self._folder = Folder(options.folder, options.max_bytes, options.daily_bytes, encryption, record, usage)
        self.index = Index(model, digest_key)
        self.reader = Reader(self._folder, self.index, encryption, destination, hits.add)
        self.writer = Writer(
            self._folder,
            self.index,
            model,
            digest_key,
            options.max_pending_bytes,
            self.reader.no_reads,
            destination.on_end,
        )

    def open(self) -> None:
        """Enforce the quota, build the index, and start the threads. Blocks. Raises OSError."""
        _warn_of_readers(self._folder.path)
        self.writer.scan()
        for thread in (self.writer.thread, self.reader.thread):
            thread.start()

    def find(
        self,
        namespace: str,
        tokens: tuple[int, ...],
        *,
        stateful: bool,
        held: Collection[int] = (),
        longer_than: int = 0,
    ) -> Chain | None:
        """Return the files of the longest stored prefix; see `Index.find`. Finds nothing while the reader takes longer
        than a caller has waited."""
        if self.reader.is_overdue:
            return None
        return self.index.find(namespace, tokens, stateful=stateful, held=held, longer_than=longer_than)

    def forget(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Remove the files along these tokens, also those whose first tokens are on no disk, and end their readings."""
        self.reader.forget(namespace, tokens)
        self.writer.forget(namespace, tokens)

    def close(self, timeout_s: float) -> None:
        """Write what waits, and end the threads. Blocks at most so long; what is not written by then is lost."""
        self.writer.close()
        self.reader.close()
        # A folder that hangs must not delay the end of the worker.
        limits = {self.writer.thread: timeout_s, self.reader.thread: min(timeout_s, 1.0)}
        for thread, limit_s in limits.items():
            if thread.is_alive():
                thread.join(limit_s)


def _warn_of_readers(folder: Path) -> None:
    """Log a warning if other users may open the folder."""
    with suppress(OSError):
        mode = folder.stat().st_mode & 0o777
        if mode & 0o077:
            logger.warning("%s: other users may open this folder (mode %o); chmod 700 keeps them out", folder, mode)
