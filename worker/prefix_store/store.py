"""The store as the engine uses it: two threads, one that reads and one that writes, and the index between them."""

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from worker.prefix_store.encryption import Encryption
from worker.prefix_store.folder import Folder
from worker.prefix_store.index import Chain, Index
from worker.prefix_store.names import model_digest
from worker.prefix_store.reader import Decode, NumTensors, ReadAhead, Reader, Reading, all_tensors, as_read
from worker.prefix_store.records import Held, HitRecord, MemoryRecord, ModelRecord
from worker.prefix_store.writer import NewSegment, Writer

logger = logging.getLogger("sluice.prefix_store")

_READER_S = 1.0  # to end; a folder that hangs must not delay the end of the worker


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
    """Segments on disk of one model. All methods may be called on any thread, and only `open` and `close` wait for the
    disk. Prefixes that were encrypted with another key, or not at all, are not found."""

    def __init__(
        self,
        options: StoreOptions,
        fingerprint: str,
        *,
        allocate: Callable[[int], Callable[[], Any]] = lambda nbytes: partial(bytearray, nbytes),
        decode: Decode = as_read,
        num_kv_tensors: NumTensors = all_tensors,
        on_read: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`fingerprint`: of the model and of all that its caches depend on. `allocate`: start to allocate a writable
        buffer of so many bytes, and return a function that waits for it; called on the reader's thread, as `decode` and
        `num_kv_tensors` are: see `Decode` and `NumTensors`. `on_read`: called there when a reading is done. `on_end`:
        called there and on the writer's thread when the thread ends. Raises OSError, and `NoCryptography` if there is a
        key and no library for it."""
        encryption = Encryption(options.key) if options.key else None
        digest_key = encryption.digest_key if encryption else b""
        model = model_digest(fingerprint, digest_key)
        record = ModelRecord(model, options.label, encrypted=encryption is not None) if options.label else None
        self._memory, hits = MemoryRecord(model, digest_key), HitRecord(model)
        usage = (hits, self._memory)
        self._folder = Folder(options.folder, options.max_bytes, options.daily_bytes, encryption, record, usage)
        self.index = Index(model, digest_key)
        self._reader = Reader(
            self._folder, self.index, encryption, allocate, decode, num_kv_tensors, hits.add, on_read, on_end
        )
        self._writer = Writer(
            self._folder, self.index, model, digest_key, options.max_pending_bytes, self._reader.no_reads, on_end
        )

    def open(self) -> None:
        """Enforce the quota, build the index, and start the threads. Blocks. Raises OSError."""
        _warn_of_readers(self._folder.path)
        self._writer.scan()
        for thread in (self._writer.thread, self._reader.thread):
            thread.start()

    @property
    def pending_bytes(self) -> int:
        """Bytes in memory that wait to be written."""
        return self._writer.pending_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that can be handed over now to be written."""
        return self._writer.room_bytes

    @property
    def read_bytes_s(self) -> float:
        """Expected speed of reading, in bytes per second: see `limit_reads`."""
        return self._reader.bytes_per_s

    def hold(self, held: Held) -> None:
        """Let people see what the worker holds in memory: see `MemoryRecord`."""
        self._memory.hold(held)

    def write(self, new: NewSegment) -> bool:
        """Write a segment later. Returns False, and forgets it, if too much waits already or the store is closed. One
        of any size may wait alone."""
        return self._writer.write(new)

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
        if not len(self.index) or self._reader.is_overdue:
            return None
        return self.index.find(namespace, tokens, stateful=stateful, held=held, longer_than=longer_than)

    def known_end(self, namespace: str, tokens: tuple[int, ...], held: Collection[int]) -> int:
        """Return the last position along these tokens at which a file ends; see `Index.known_end`."""
        return self.index.known_end(namespace, tokens, held) if len(self.index) else 0

    def forget(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Remove the files along these tokens, also those whose first tokens are on no disk."""
        self._writer.forget(namespace, tokens)

    def read(self, chain: Chain) -> Reading:
        """Start to read a chain, or return the reading of the same files that is under way. It is given up if all
        callers drop the returned object."""
        return self._reader.read(chain)

    def read_ahead(self, chain: Chain) -> ReadAhead:
        """Bring the files of a chain into the system's page cache while nothing is read, since they are likely to be
        read soon. Ends if the caller drops the returned object."""
        return self._reader.read_ahead(chain)

    def limit_reads(self, *, decoding: bool) -> None:
        """Read slowly from now on if rows decode, so that their gaps stay as they are, and fast if none does."""
        self._reader.limit_reads(decoding=decoding)

    def give_up(self, reading: Reading, waited_s: float) -> None:
        """Record that a reading took too long for a caller: see `find`."""
        self._reader.give_up(reading, waited_s)

    def wait_for_room(self, nbytes: int, until_s: float) -> bool:
        """Wait until so many bytes can be handed over, at most until this time.monotonic(). Returns True if they can.
        From now on writes are not slowed down, and wait a second at most for other processes: the worker ends."""
        return self._writer.wait_for_room(nbytes, until_s)

    def close(self, timeout_s: float) -> None:
        """Write what waits, and end the threads. Blocks at most so long; what is not written by then is lost."""
        self._writer.close()
        self._reader.close()
        limits = {self._writer.thread: timeout_s, self._reader.thread: min(timeout_s, _READER_S)}
        for thread, limit_s in limits.items():
            if thread.is_alive():
                thread.join(limit_s)


def _warn_of_readers(folder: Path) -> None:
    """Log a warning if other users may open the folder."""
    with suppress(OSError):
        mode = folder.stat().st_mode & 0o777
        if mode & 0o077:
            logger.warning("%s: other users may open this folder (mode %o); chmod 700 keeps them out", folder, mode)
