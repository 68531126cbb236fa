"""The store as the engine uses it: two threads, one that reads and one that writes, and the index between them."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.prefix_store.folder import Folder, Unwritable
from worker.prefix_store.format import BadFile, Header, Place, read_header, read_tensors
from worker.prefix_store.index import Chain, Index
from worker.prefix_store.names import FileName, TokenDigest, model_digest

logger = logging.getLogger("sluice.prefix_store")

_RESCAN_S = 5.0  # other workers write into the folder too
_PAUSE_S = 60.0  # after a failed write
_WRITE_BYTES_S = 300e6  # while the worker serves, so that reads and the machine's memory bus are left free
_FIRST_READ_BYTES_S = 500e6  # until reads are measured
_WEIGHT = 0.3  # of the last measurement in the speed


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of a store."""

    folder: Path
    max_bytes: int  # of all files in the folder
    daily_bytes: int | None = None  # written in a day; None: no limit
    max_pending_bytes: int = 256_000_000  # in memory, waiting to be written


@dataclass(frozen=True, slots=True)
class NewPlace:
    """A place to store. The tensors must not change until they are written."""

    path: tuple[int, ...]  # all tokens up to the end of the place
    has_state: bool
    place: Place


@dataclass(frozen=True, slots=True)
class ReadPlace:
    """A place that was read."""

    header: Header
    buffers: tuple[Any, ...]  # of each tensor, as `allocate` returned it


class Reading:
    """A chain of files that is being read. `places` is set before `done`."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.done = False
        self.places: tuple[ReadPlace, ...] = ()  # the first ones of the chain; fewer if a file was bad

    def finish(self, places: tuple[ReadPlace, ...]) -> None:
        """Hand over what was read. Called on the reader's thread."""
        self.places = places
        self.done = True


class PrefixStore:
    """Places on disk of one model. All methods may be called on any thread, and none waits for the disk but `open` and
    `close`."""

    def __init__(
        self,
        options: StoreOptions,
        fingerprint: str,
        *,
        allocate: Callable[[int], Any] = bytearray,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        """`fingerprint`: of the model and of all that its caches depend on. `allocate`: return a writable buffer of so
        many bytes; called on the reader's thread. `on_read`: called there when a reading is done."""
        self._model = model_digest(fingerprint)
        self._options = options
        self._allocate = allocate
        self._on_read = on_read
        self._folder = Folder(options.folder, options.max_bytes, options.daily_bytes)
        self.index = Index(self._model)
        self.read_bytes_s = _FIRST_READ_BYTES_S
        self._pending = _Counter()
        self._hurried = threading.Event()  # the worker ends: write as fast as possible
        self._closed = threading.Event()
        self._writes: queue.SimpleQueue[NewPlace | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[weakref.ref[Reading] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._write_all, name="prefix-writer", daemon=True),
            threading.Thread(target=self._read_all, name="prefix-reader", daemon=True),
        ]

    def open(self) -> None:
        """Enforce the quota, build the index, and start the threads. Blocks. Raises OSError."""
        self._folder.enforce()
        self.index.replace(self._folder.names)
        for thread in self._threads:
            thread.start()

    @property
    def pending_bytes(self) -> int:
        """Bytes in memory that wait to be written."""
        return self._pending.value

    def write(self, place: NewPlace) -> bool:
        """Write a place later. Returns False, and forgets it, if too much waits already or the store is closed. A place
        of any size may wait alone."""
        waiting = self.pending_bytes
        if self._closed.is_set() or (waiting and waiting + place.place.nbytes > self._options.max_pending_bytes):
            return False
        self._pending.add(place.place.nbytes)
        self._writes.put(place)
        return True

    def find(
        self,
        namespace: str,
        tokens: tuple[int, ...],
        *,
        stateful: bool,
        held: Collection[int] = (),
        longer_than: int = 0,
    ) -> Chain | None:
        """Return the files of the longest stored prefix; see `Index.find`."""
        if not len(self.index):
            return None
        return self.index.find(namespace, tokens, stateful=stateful, held=held, longer_than=longer_than)

    def forget(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Remove the files of these tokens. Blocks."""
        while (chain := self.find(namespace, tokens, stateful=False)) is not None:
            for name in chain.files:
                self._folder.remove(name)
                self.index.discard(name)

    def read(self, chain: Chain) -> Reading:
        """Start to read a chain. It is given up if the caller drops the returned object."""
        reading = Reading(chain)
        self._reads.put(weakref.ref(reading))
        return reading

    def size_of(self, name: FileName) -> int:
        """Return the bytes of a file; 0 if it is gone."""
        with suppress(OSError):
            return (self._folder.path / str(name)).stat().st_size
        return 0

    def wait_for_room(self, nbytes: int, until_s: float) -> bool:
        """Wait until so many bytes can be handed over, at most until this time.monotonic(). Returns True if they can.
        Writes are not slowed down from now on."""
        self._hurried.set()
        while self.pending_bytes and self.pending_bytes + nbytes > self._options.max_pending_bytes:
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.005)
        return True

    def close(self, timeout_s: float) -> None:
        """Write what waits, and end the threads. Blocks at most so long; what is not written by then is lost."""
        self._hurried.set()
        self._closed.set()
        self._writes.put(None)
        self._reads.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    # On the writer's thread

    def _write_all(self) -> None:
        paused_until = 0.0
        scanned = time.monotonic()
        while True:
            if time.monotonic() - scanned >= _RESCAN_S:
                self._rescan()
                scanned = time.monotonic()
            try:
                new = self._writes.get(timeout=_RESCAN_S)
            except queue.Empty:
                continue
            if new is None:
                return
            if time.monotonic() >= paused_until and not self._write(new):
                paused_until = time.monotonic() + _PAUSE_S
            self._pending.add(-new.place.nbytes)
            del new  # else its memory would be held until the next one comes

    def _rescan(self) -> None:
        """Count the files of others, and find those that other workers have written."""
        try:
            self._folder.enforce()
        except OSError as error:
            logger.warning("prefixes on disk: the folder cannot be read: %s", error)
        self.index.replace(self._folder.names)

    def _write(self, new: NewPlace) -> bool:
        """Write a place unless it is stored already. Returns False if the disk fails."""
        name = self._name_of(new)
        if name in self.index:
            self._folder.touch(name)
            return True
        began = time.monotonic()
        try:
            stored = self._folder.write(name, new.place)
        except Unwritable as error:
            logger.warning("prefixes on disk: nothing is written for %.0f s: %s", _PAUSE_S, error)
            return False
        if stored:
            self.index.add(name)
        if not self._hurried.is_set():
            self._hurried.wait(max(0.0, new.place.nbytes / _WRITE_BYTES_S - (time.monotonic() - began)))
        return True

    def _name_of(self, new: NewPlace) -> FileName:
        digest = TokenDigest(self._model, new.place.namespace)
        start, end = len(new.path) - len(new.place.tokens), len(new.path)
        digest.update(new.path[:start])
        parent = digest.hexdigest()
        digest.update(new.path[start:])
        return FileName(self._model, parent, digest.hexdigest(), start, end, new.has_state)

    # On the reader's thread

    def _read_all(self) -> None:
        while (reference := self._reads.get()) is not None:
            if (reading := reference()) is not None:
                del reference
                self._read_chain(reading)
                self._on_read()
            reading = None

    def _read_chain(self, reading: Reading) -> None:
        chain, began = reading.chain, time.perf_counter()
        places = list[ReadPlace]()
        for name in chain.files:
            place = self._read_place(name, chain)
            if place is None or self._closed.is_set():
                break
            places.append(place)
        nbytes = sum(place.header.ends[-1] for place in places if place.header.ends)
        if places and nbytes:
            speed = nbytes / max(time.perf_counter() - began, 1e-9)
            self.read_bytes_s += _WEIGHT * (speed - self.read_bytes_s)
        reading.finish(tuple(places))

    def _read_place(self, name: FileName, chain: Chain) -> ReadPlace | None:
        """Read a file, and mark it as used. Returns None if it is gone, or bad: then it is removed."""
        path = self._folder.path / str(name)
        try:
            with path.open("rb", buffering=0) as file:
                header = read_header(file, name)
                if (header.namespace, header.tokens) != (chain.namespace, chain.tokens[name.start : name.end]):
                    raise BadFile("it holds other tokens")
                buffers = read_tensors(file, header, self._allocate)
        except BadFile as error:
            logger.warning("prefixes on disk: %s is removed: %s", path.name, error)
            self._folder.remove(name)
            self.index.discard(name)
            return None
        except FileNotFoundError:  # removed for space by another worker
            self.index.discard(name)
            return None
        except (OSError, MemoryError, RuntimeError, ValueError, LookupError, TypeError) as error:
            # Without memory MLX raises MemoryError, RuntimeError or ValueError.
            logger.warning("prefixes on disk: %s cannot be read: %s", path.name, error)
            self.index.discard(name)
            return None
        self._folder.touch(name)
        return ReadPlace(header, tuple(buffers))


class _Counter:
    """A number that several threads change."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, amount: int) -> None:
        with self._lock:
            self.value += amount
