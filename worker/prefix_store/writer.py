"""The thread that writes files, and removes those of prefixes that are to be forgotten."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from worker.outcomes import NotStored
from worker.prefix_store.background import Pace, lower_priority
from worker.prefix_store.folder import Folder, Unwritable
from worker.prefix_store.format import StoredSegment
from worker.prefix_store.index import Index
from worker.prefix_store.names import FileName, TokenDigest

logger = logging.getLogger("sluice.prefix_store")

_RESCAN_S = 5.0  # other workers write into the folder too
_PAUSE_S = 60.0  # after a failed write


class WriteReport:
    """What has become of segments that were handed over together. Filled on the writer's thread, read on any."""

    def __init__(self) -> None:
        self._waiting = _Counter()
        self.written_bytes = 0  # of the files that were written
        self.refusal: NotStored | None = None  # why the first segment that is not on disk was not written
        self.end = 0  # tokens of the prefix that the segments form

    @property
    def done(self) -> bool:
        """True if all segments that were handed over are on disk or refused."""
        return self._waiting.value == 0

    def expect_end(self, end: int) -> None:
        """Record at which token the prefix ends, before its last segment is handed over."""
        self.end = end

    def expect(self) -> None:
        """Count a segment that is handed over."""
        self._waiting.add(1)

    def settle(self, result: int | NotStored) -> None:
        """Record the result of a segment: the bytes that were written for it, or why it is not on disk."""
        if isinstance(result, NotStored):
            self.refusal = self.refusal or result
        else:
            self.written_bytes += result
        self._waiting.add(-1)


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A segment to store. The tensors must not change until they are written."""

    path: tuple[int, ...]  # all tokens up to the end of the segment
    has_state: bool
    content: StoredSegment
    pinned: bool = False  # not to be removed for space
    ends_pinned: bool = False  # the pinned prefix ends with it
    report: WriteReport | None = None  # receives the result
    memory_bytes: int | None = None  # taken until it is written; None: the bytes of the tensors

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it takes until it is written."""
        return self.content.nbytes if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True, slots=True)
class _Forget:
    namespace: str
    tokens: tuple[int, ...]


class Writer:
    """Writes segments in the order in which they come, on a thread of its own. All methods may be called on any
    thread."""

    def __init__(
        self,
        folder: Folder,
        index: Index,
        model: str,
        digest_key: bytes,
        max_pending_bytes: int,
        no_reads: threading.Event,
        on_end: Callable[[], None],
    ) -> None:
        """`model`: digest of the model. `digest_key`: of the digests of tokens. `max_pending_bytes`: most bytes that
        wait to be written. `no_reads`: set while nothing is read, which requests wait for; writes give way. `on_end`:
        called on the writer's thread when it ends."""
        self._folder, self._index = folder, index
        self._model, self._digest_key = model, digest_key
        self._max_pending_bytes = max_pending_bytes
        self._on_end = on_end
        self._pending = _Counter()
        self._unlimited = threading.Event()  # the worker ends: write as fast as possible
        self._closed = threading.Event()
        # While the worker serves, reads and the machine's memory bus are left free.
        self._pace = Pace(300e6, self._unlimited, no_reads)
        self._paused_until_s = 0.0  # time.monotonic() before which nothing is written, after a failure
        self._lost = 0  # segments, since the last failure
        self._unlisted = False  # the last scan has failed
        self._forgotten = list[_Forget]()  # whose files are removed after the next scan
        self._queue: queue.SimpleQueue[NewSegment | _Forget | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="prefix-writer", daemon=True)

    @property
    def pending_bytes(self) -> int:
        """Bytes in memory that wait to be written."""
        return self._pending.value

    @property
    def room_bytes(self) -> int:
        """Bytes that can be handed over now to be written."""
        return max(0, self._max_pending_bytes - self.pending_bytes)

    def write(self, new: NewSegment) -> bool:
        """Write a segment later. Returns False, and forgets it, if too much waits already or the writer is closed. One
        of any size may wait alone."""
        waiting = self.pending_bytes
        if self._closed.is_set() or (waiting and waiting + new.held_bytes > self._max_pending_bytes):
            return False
        self._pending.add(new.held_bytes)
        if new.report:
            new.report.expect()
        self._queue.put(new)
        return True

    def forget(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Find the files along these tokens no more, and remove them later, also those that wait to be written now."""
        self._index.forget(namespace, tokens)
        self._queue.put(_Forget(namespace, tokens))

    def wait_for_room(self, nbytes: int, until_s: float) -> bool:
        """Wait until so many bytes can be handed over, at most until this time.monotonic(). Returns True if they can.
        From now on writes are not slowed down, and wait a second at most for other processes: the worker ends."""
        self._hurry()
        while self.pending_bytes and self.pending_bytes + nbytes > self._max_pending_bytes:
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """Accept nothing more, and let the thread end when it has written what waits."""
        self._hurry()
        self._closed.set()
        self._queue.put(None)

    def _hurry(self) -> None:
        self._unlimited.set()
        self._folder.lock.shorten_waits()

    def scan(self) -> None:
        """Enforce the quota, and let the index hold what is in the folder. Writes pause if the folder can be read only.
        For the writer's thread, and before it starts. Raises OSError, and leaves the index as it is, if the folder
        cannot be read."""
        try:
            self._folder.enforce()
        except Unwritable as error:
            self._pause(error)
        self._index.replace(self._folder.sizes)

    # On the writer's thread

    def _run(self) -> None:
        lower_priority()
        try:
            self._write_all()
        finally:
            self._on_end()

    def _write_all(self) -> None:
        scanned = time.monotonic()
        while True:
            if time.monotonic() - scanned >= _RESCAN_S:
                self._attempt(self._rescan)
                scanned = time.monotonic()
            try:
                command = self._queue.get(timeout=_RESCAN_S)
            except queue.Empty:
                continue
            match command:
                case None:
                    self._report_lost()
                    self._folder.end_usage()
                    return
                case _Forget():
                    self._forgotten.append(command)
                    self._attempt(self._rescan)
                case NewSegment():
                    self._attempt(partial(self._process, command))
            del command  # else its memory would be held until the next one comes

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do a part of this thread's work. After a failure nothing is written for a while."""
        try:
            action()
        except Exception as error:  # the border of this thread: an error loses what it was about, and nothing later
            self._pause(error)

    def _pause(self, error: Exception) -> None:
        """Log an error, and write nothing for a while, which further errors meanwhile do not prolong."""
        if self._is_paused:
            return
        if isinstance(error, Unwritable):
            logger.warning("prefixes on disk: nothing is written for %.0f s: %s", _PAUSE_S, error)
        else:
            logger.error(
                "prefixes on disk: nothing is written for %.0f s: unexpected error", _PAUSE_S, exc_info=error
            )  # fmt: skip
        self._paused_until_s = time.monotonic() + _PAUSE_S

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until_s

    def _report_lost(self) -> None:
        """Log how many segments were not written after the last failure."""
        if self._lost:
            logger.warning("prefixes on disk: parts of prefixes that were not written since then: %d", self._lost)
        self._lost = 0

    def _rescan(self) -> None:
        """Count the files of others, find those that other workers have written, and remove those that are to be
        forgotten. If the scan fails, they are removed after a later one."""
        try:
            self.scan()
            self._unlisted = False
        except OSError as error:
            if not self._unlisted:
                logger.warning("prefixes on disk: the folder cannot be read: %s", error)
            self._unlisted = True
            return
        while self._forgotten:
            self._remove(self._forgotten.pop())

    def _remove(self, forgotten: _Forget) -> None:
        """Remove the files along forgotten tokens, and never read those that cannot be removed."""
        namespace, tokens = forgotten.namespace, forgotten.tokens
        for name in self._index.along(namespace, tokens, self._folder.sizes):
            if not self._folder.remove(name):
                self._folder.leave_alone(name)
        self._index.end_forget(namespace, tokens)

    def _process(self, new: NewSegment) -> None:
        result: int | NotStored = NotStored.DISK
        try:
            result = self._write(new)
        finally:
            self._lost += result is NotStored.DISK
            self._pending.add(-new.held_bytes)
            if new.report:
                new.report.settle(result)

    def _write(self, new: NewSegment) -> int | NotStored:
        """Write a segment unless it is stored already. Returns the bytes of a new file, or why there is none. Raises
        `Unwritable`."""
        if new.report and new.report.refusal:  # files of a prefix that follow a gap are useless
            return new.report.refusal
        if self._is_paused:
            return NotStored.DISK
        self._report_lost()
        name = self._name_of(new)
        if self._is_stored(name, new):
            return 0
        result = self._folder.write(
            name, new.content, pinned=new.pinned, ends_pinned=new.ends_pinned, on_written=self._pace
        )
        if not isinstance(result, NotStored):
            self._index.add(name, result)
            if name.has_state:  # it replaces the file without the state
                self._index.discard(replace(name, has_state=False))
        return result

    def _is_stored(self, name: FileName, new: NewSegment) -> bool:
        """Return True if a file has this segment. It is used now, and pinned if the segment is to be."""
        stored = self._index.stored(name)
        if stored is None:
            return False
        if not self._folder.touch(stored):  # it was deleted by another program
            self._index.discard(stored)
            return False
        if new.pinned and not self._folder.pin(stored, is_end=new.ends_pinned):
            raise Unwritable(f"{stored} cannot be pinned")
        return True

    def _name_of(self, new: NewSegment) -> FileName:
        digest = TokenDigest(self._model, new.content.namespace, self._digest_key)
        start, end = len(new.path) - len(new.content.tokens), len(new.path)
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
