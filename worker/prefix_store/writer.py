"""The thread that writes files, and removes those of prefixes that are to be forgotten."""

import logging
import queue
import threading
import time
from dataclasses import dataclass

from worker.prefix_store.folder import Folder, Unwritable
from worker.prefix_store.format import Place
from worker.prefix_store.index import Index
from worker.prefix_store.names import FileName, TokenDigest

logger = logging.getLogger("sluice.prefix_store")

_RESCAN_S = 5.0  # other workers write into the folder too
_PAUSE_S = 60.0  # after a failed write
_WRITE_BYTES_S = 300e6  # while the worker serves, so that reads and the machine's memory bus are left free


@dataclass(frozen=True, slots=True)
class NewPlace:
    """A place to store. The tensors must not change until they are written."""

    path: tuple[int, ...]  # all tokens up to the end of the place
    has_state: bool
    place: Place
    pinned: bool = False  # not to be removed for space


@dataclass(frozen=True, slots=True)
class _Forget:
    namespace: str
    tokens: tuple[int, ...]


class Writer:
    """Writes places in the order in which they come, on a thread of its own. All methods may be called on any
    thread."""

    def __init__(self, folder: Folder, index: Index, model: str, digest_key: bytes, max_pending_bytes: int) -> None:
        """`model`: digest of the model. `digest_key`: of the digests of tokens. `max_pending_bytes`: most bytes that
        wait to be written."""
        self._folder, self._index = folder, index
        self._model, self._digest_key = model, digest_key
        self._max_pending_bytes = max_pending_bytes
        self._pending = _Counter()
        self._hurried = threading.Event()  # the worker ends: write as fast as possible
        self._closed = threading.Event()
        self._queue: queue.SimpleQueue[NewPlace | _Forget | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._write_all, name="prefix-writer", daemon=True)

    @property
    def pending_bytes(self) -> int:
        """Bytes in memory that wait to be written."""
        return self._pending.value

    def write(self, place: NewPlace) -> bool:
        """Write a place later: see `PrefixStore.write`."""
        waiting = self.pending_bytes
        if self._closed.is_set() or (waiting and waiting + place.place.nbytes > self._max_pending_bytes):
            return False
        self._pending.add(place.place.nbytes)
        self._queue.put(place)
        return True

    def forget(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Remove the files along these tokens later, also those that wait to be written now."""
        for name in self._index.along(namespace, tokens):
            self._index.discard(name)
        self._queue.put(_Forget(namespace, tokens))

    def wait_for_room(self, nbytes: int, until_s: float) -> bool:
        """Wait until `nbytes` can be handed over: see `PrefixStore.wait_for_room`."""
        self._hurried.set()
        while self.pending_bytes and self.pending_bytes + nbytes > self._max_pending_bytes:
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """Accept nothing more, and let the thread end when it has written what waits."""
        self._hurried.set()
        self._closed.set()
        self._queue.put(None)

    # On the writer's thread

    def _write_all(self) -> None:
        paused_until = 0.0
        scanned = time.monotonic()
        while True:
            if time.monotonic() - scanned >= _RESCAN_S:
                self._rescan()
                scanned = time.monotonic()
            try:
                command = self._queue.get(timeout=_RESCAN_S)
            except queue.Empty:
                continue
            match command:
                case None:
                    return
                case _Forget(namespace, tokens):
                    self._remove(namespace, tokens)
                case NewPlace():
                    if time.monotonic() >= paused_until and not self._write(command):
                        paused_until = time.monotonic() + _PAUSE_S
                    self._pending.add(-command.place.nbytes)
            del command  # else its memory would be held until the next one comes

    def _rescan(self) -> None:
        """Count the files of others, and find those that other workers have written."""
        try:
            self._folder.enforce()
        except OSError as error:
            logger.warning("prefixes on disk: the folder cannot be read: %s", error)
        self._index.replace(self._folder.sizes)

    def _remove(self, namespace: str, tokens: tuple[int, ...]) -> None:
        self._rescan()  # the index is without the files that were discarded by `forget`
        for name in self._index.along(namespace, tokens):
            self._index.discard(name)
            self._folder.remove(name)

    def _write(self, new: NewPlace) -> bool:
        """Write a place unless it is stored already. Returns False if the disk fails."""
        name = self._name_of(new)
        if stored := self._index.stored(name):
            self._folder.touch(stored)
            self._pin(stored, new)
            return True
        began = time.monotonic()
        try:
            nbytes = self._folder.write(name, new.place)
        except Unwritable as error:
            logger.warning("prefixes on disk: nothing is written for %.0f s: %s", _PAUSE_S, error)
            return False
        if nbytes:
            self._index.add(name, nbytes)
            self._pin(name, new)
        if not self._hurried.is_set():
            self._hurried.wait(max(0.0, new.place.nbytes / _WRITE_BYTES_S - (time.monotonic() - began)))
        return True

    def _pin(self, name: FileName, new: NewPlace) -> None:
        if new.pinned:
            self._folder.pin(name)

    def _name_of(self, new: NewPlace) -> FileName:
        digest = TokenDigest(self._model, new.place.namespace, self._digest_key)
        start, end = len(new.path) - len(new.place.tokens), len(new.path)
        digest.update(new.path[:start])
        parent = digest.hexdigest()
        digest.update(new.path[start:])
        return FileName(self._model, parent, digest.hexdigest(), start, end, new.has_state)


class _Counter:
    """A number that several threads change."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, amount: int) -> None:
        with self._lock:
            self.value += amount
