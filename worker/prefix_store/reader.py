"""The thread that reads files for callers that wait, and ahead of need into the system's page cache."""

import errno
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from worker.prefix_store.background import Pace, lower_priority
from worker.prefix_store.encryption import Encryption
from worker.prefix_store.folder import Folder
from worker.prefix_store.format import BadFile, Header, OnRead, read_header, read_tensors, will_need
from worker.prefix_store.index import Chain, Index
from worker.prefix_store.names import FileName

logger = logging.getLogger("sluice.prefix_store")

_PIECE_BYTES = 1 << 20  # after each, a load that has come meanwhile is first
_MAX_AHEAD_BYTES = 4 << 30  # of requests that wait: the page cache may lose what is read long before its use
_SHARED_BYTES_S = 300e6  # while rows decode: the machine's memory bus is left to them
_TEMPORARY_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # the process or the machine has none left


class ReadAhead:
    """Files that a waiting request is expected to load. Nothing more of them is read once the caller drops it."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain


class _PageCache:
    """Brings files into the page cache, piece by piece, those of the request that came first before others. For the
    reader's thread."""

    def __init__(self, folder: Path, needed_bytes: Callable[[FileName, bool, BinaryIO], int], pace: Pace) -> None:
        """`needed_bytes`: return how many of a file's first bytes a load needs, given if the file is the last of its
        chain; raises `BadFile` and what a bad layout raises."""
        self._folder = folder
        self._needed_bytes = needed_bytes
        self._pace = pace
        self._accepted = list[weakref.ref[ReadAhead]]()
        self._left = deque[tuple[weakref.ref[ReadAhead], Iterator[int]]]()

    @property
    def has_work(self) -> bool:
        """True if files are left to bring."""
        return bool(self._left)

    def add(self, ahead: ReadAhead) -> None:
        """Bring these files later, unless those of earlier requests take the page cache."""
        waiting = [each for reference in self._accepted if (each := reference()) is not None]
        if sum(each.chain.nbytes for each in (*waiting, ahead)) > _MAX_AHEAD_BYTES:
            return
        self._accepted = [weakref.ref(each) for each in (*waiting, ahead)]
        self._left.append((weakref.ref(ahead), self._pieces(ahead.chain)))

    def bring_piece(self) -> None:
        """Bring the next piece. Blocks for as long as the rate asks for."""
        reference, pieces = self._left[0]
        nbytes = None if reference() is None else next(pieces, None)
        if nbytes is None:
            self._left.popleft()
        else:
            self._pace(nbytes)

    def _pieces(self, chain: Chain) -> Iterator[int]:
        """Bring one piece for each number of bytes that is yielded, up to the first bad file: the load reports it."""
        with suppress(OSError, BadFile, LookupError, TypeError, ValueError):
            for name in chain.files:
                needed_bytes = partial(self._needed_bytes, name, name == chain.files[-1])
                with closing(_bring(self._folder / str(name), needed_bytes)) as pieces:
                    yield from pieces


def _bring(path: Path, needed_bytes: Callable[[BinaryIO], int]) -> Generator[int, None, None]:
    with path.open("rb", buffering=0) as file:
        end = needed_bytes(file)
        for at in range(0, end, _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, end - at)
            if not will_need(file, at, nbytes):
                os.pread(file.fileno(), nbytes, at)
            yield nbytes


def advise(path: Path, nbytes: int) -> None:
    """Let the system begin to read the first bytes of a file, if it has a call for that. Does not wait for them, and
    raises no OSError."""
    with suppress(OSError), path.open("rb", buffering=0) as file:
        will_need(file, 0, nbytes)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedSegment:
    """A segment that was read."""

    header: Header
    arrays: tuple[Any, ...]  # as `decode` returned them
    has_state: bool = False  # the state after the tokens was read too

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the file."""
        return self.header.ends[-1] if self.header.ends else 0


class Destination:
    """What files are read into: its buffers, and what callers use of them. Here plain bytes. All methods are called on
    the reader's thread."""

    def allocate(self, nbytes: int) -> Callable[[], Any]:
        """Start to allocate a writable buffer, and return a function that waits for it."""
        return partial(bytearray, nbytes)

    def num_kv_tensors(self, header: Header) -> int:
        """Return the number of a file's first tensors that hold KV. The others hold the state."""
        return len(header.ends)

    def decode(self, header: Header, buffers: list[Any], on_done: OnRead) -> Sequence[Any]:
        """Return what callers use of a file's buffers, one for each tensor. `on_done`: is called with the bytes of each
        piece of the work, and may block. What is raised makes the file a miss."""
        return buffers

    def on_read(self) -> None:
        """Called when a reading is done."""

    def on_end(self) -> None:
        """Called when the thread ends; on the writer's thread too."""


class ChainReading:
    """A chain of files that is being read, for one or several callers. It is given up when all of them have dropped
    it. `segments` is set before `done`."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.done = False
        self.segments: tuple[LoadedSegment, ...] = ()  # the first ones of the chain; fewer if a file was bad
        self._lock = threading.Lock()  # so that nothing is handed over after `cancel`

    def finish(self, segments: tuple[LoadedSegment, ...]) -> None:
        """Hand over what was read, unless the reading was cancelled. Called on the reader's thread."""
        with self._lock:
            if not self.done:
                self.segments = segments
                self.done = True

    def cancel(self) -> None:
        """End the reading for all callers, and drop its result."""
        with self._lock:
            self.done = True
            self.segments = ()


class Reader:
    """Reads chains one after the other, on a thread of its own. All methods may be called on any thread."""

    def __init__(
        self,
        folder: Folder,
        index: Index,
        encryption: Encryption | None,
        destination: Destination,
        on_hit: Callable[[FileName], None],
    ) -> None:
        """Files that are bad or gone are discarded from `index`. `on_hit`: called on the reader's thread with each file
        that was read."""
        self._folder, self._index = folder, index
        self._encryption = encryption
        self._destination = destination
        self._on_hit = on_hit
        self._unlimited_bytes_per_s = 500e6  # until reads are measured, which they are while they are not limited
        self._work_per_byte = 1.0  # bytes read and decoded, for each byte of a file
        self.no_reads = threading.Event()  # set while nothing is read
        self.no_reads.set()
        self._unlimited = threading.Event()  # set while no row decodes, so that reads are not limited
        self._unlimited.set()
        beside = partial(lower_priority, awaited=True)
        self._checksums = ThreadPoolExecutor(1, "prefix-checksums", initializer=beside)
        self._pace = Pace(_SHARED_BYTES_S, self._unlimited)
        self._page_cache = _PageCache(folder.path, self._needed_bytes, Pace(_SHARED_BYTES_S, self._unlimited))
        self._began_s: float | None = None  # time at which what is read now was begun
        self._given_up_s = float("-inf")  # time at which a caller last gave up
        self._closed = threading.Event()
        self._queue: queue.SimpleQueue[weakref.ref[ChainReading] | weakref.ref[ReadAhead] | None] = queue.SimpleQueue()
        # Several callers that want the same files share one reading; others the files that both chains have.
        self._readings = weakref.WeakSet[ChainReading]()  # that callers hold
        self._segments = weakref.WeakValueDictionary[tuple[FileName, bool], LoadedSegment]()  # True: with its state
        self.thread = threading.Thread(target=self._run, name="prefix-reader", daemon=True)

    def read(self, chain: Chain) -> ChainReading:
        """Start to read a chain, or return the reading of the same files that is under way. It is given up if all
        callers drop the returned object."""
        for reading in [*self._readings]:
            if reading.chain.files == chain.files and not reading.done:
                return reading
        reading = ChainReading(chain)
        self._readings.add(reading)
        self._queue.put(weakref.ref(reading))
        return reading

    def waiting_bytes(self, *chains: Chain) -> int:
        """Return the bytes of the files that are read before those of a load of these chains that begins now."""
        own = {chain.files for chain in chains}
        reading = (reading.chain for reading in [*self._readings] if not reading.done)
        return sum(chain.nbytes for chain in reading if chain.files not in own)

    def read_ahead(self, chain: Chain) -> ReadAhead:
        """Bring the files of a chain into the system's page cache while nothing is read, since they are likely to be
        read soon. Ends if the caller drops the returned object."""
        ahead = ReadAhead(chain)
        self._queue.put(weakref.ref(ahead))
        return ahead

    def forget(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Cancel the readings of files along these tokens that callers hold, finished ones included."""
        for reading in [*self._readings]:
            if reading.chain.is_along(namespace, tokens):
                reading.cancel()

    @property
    def bytes_per_s(self) -> float:
        """Expected speed of reading and decoding, in bytes of files: as measured, but at most the limit beside rows
        that decode: see `limit_reads`."""
        limit = float("inf") if self._unlimited.is_set() else _SHARED_BYTES_S / self._work_per_byte
        return min(self._unlimited_bytes_per_s, limit)

    def limit_reads(self, *, decoding: bool) -> None:
        """Read slowly from now on if rows decode, so that their gaps stay as they are, and fast if none does, or once
        the store is closed."""
        if decoding and not self._closed.is_set():
            self._unlimited.clear()
        else:
            self._unlimited.set()

    @property
    def is_overdue(self) -> bool:
        """True while something is read that was begun before a caller gave up: the folder may not answer."""
        began_s = self._began_s
        return began_s is not None and began_s <= self._given_up_s

    def give_up(self, reading: ChainReading, waited_s: float) -> None:
        """Record that a caller computes the prefix instead, after `waited_s` seconds: until the reading has ended,
        nothing is found. Logs the first one of several."""
        was_overdue = self.is_overdue
        self._given_up_s = time.monotonic()
        if not was_overdue:
            logger.warning(
                "prefixes on disk: %d tokens are computed, since they were not read within %.1f s",
                len(reading.chain.tokens), waited_s,
            )  # fmt: skip

    def close(self) -> None:
        """Let the thread end after the file that it reads, without pauses."""
        self._closed.set()
        self._unlimited.set()
        self._queue.put(None)

    # On the reader's thread

    def _run(self) -> None:
        lower_priority(awaited=True)
        try:
            self._read_all()
        finally:
            self._checksums.shutdown(wait=False)
            self._destination.on_end()

    def _read_all(self) -> None:
        while (reference := self._next()) is not None:
            asked = reference()
            if isinstance(asked, ReadAhead):
                self._page_cache.add(asked)
            elif asked is not None and not asked.done:
                reading, chain = weakref.ref(asked), asked.chain
                del asked  # so that it is given up when no caller holds it
                self._process(chain, reading)
            asked = None

    def _next(self) -> "weakref.ref[ChainReading] | weakref.ref[ReadAhead] | None":
        """Return what was asked for next. While nothing is, read ahead."""
        while self._page_cache.has_work:
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                self._began_s = time.monotonic()
                self._page_cache.bring_piece()
                self._began_s = None
        return self._queue.get()

    def _process(self, chain: Chain, reference: "weakref.ref[ChainReading]") -> None:
        """Read a chain, and hand over what was read of it, also after an error."""
        segments = list[LoadedSegment]()
        self._began_s = time.monotonic()
        self.no_reads.clear()
        try:
            self._read_chain(chain, reference, segments)
        except Exception:  # the border of this thread: an error makes a file a miss, and ends no later reading
            logger.exception("prefixes on disk: a prefix is computed instead of read: unexpected error")
            for name in chain.files[len(segments) :][:1]:  # the file at which it happened
                self._leave_alone(name)
        finally:
            self.no_reads.set()
            self._began_s = None
            if (reading := reference()) is not None:
                reading.finish(tuple(segments))
            del reading, segments  # what no caller holds is freed now
            self._destination.on_read()

    def _read_chain(self, chain: Chain, reference: "weakref.ref[ChainReading]", segments: list[LoadedSegment]) -> None:
        """Read the files of a chain into `segments`, up to the first bad one, or until no caller waits. Of the states,
        only the last one is read: callers continue there."""
        began, unlimited = time.perf_counter(), self._unlimited.is_set()
        paced = self._pace.nbytes
        nbytes = 0
        for name, following in zip_longest(chain.files, chain.files[1:]):
            if not self._is_wanted(reference):
                break
            if following:
                self._advise(following, chain, segments)
            with_state = name.has_state and name == chain.files[-1]
            segment = self._shared(name, with_state)
            if segment is None:
                segment = self._read_segment(name, chain, with_state)
                nbytes += segment.nbytes if segment else 0
            if segment is None:
                self._end_with_state(chain, segments)
                break
            self._segments[name, segment.has_state] = segment
            segments.append(segment)
        if nbytes:
            self._work_per_byte = max(1.0, (self._pace.nbytes - paced) / nbytes)
        if nbytes and unlimited and self._unlimited.is_set():
            speed = nbytes / max(time.perf_counter() - began, 1e-9)
            self._unlimited_bytes_per_s += 0.3 * (speed - self._unlimited_bytes_per_s)

    def _advise(self, name: FileName, chain: Chain, segments: list[LoadedSegment]) -> None:
        """Let the disk begin with the file that is read next. Its KV takes about as many bytes as that of the one
        before, and is taken for 1 MiB if there is none."""
        nbytes = chain.sizes[chain.files.index(name)]
        if name.has_state and name != chain.files[-1]:
            nbytes = self._end_of(segments[-1].header, with_state=False) if segments else 1 << 20
        advise(self._folder.path / str(name), nbytes)

    def _needed_bytes(self, name: FileName, last: bool, file: BinaryIO) -> int:
        """Return how many of a file's first bytes a load needs."""
        return self._end_of(read_header(file, name, self._encryption), with_state=last)

    def _end_of(self, header: Header, *, with_state: bool) -> int:
        """Return the byte after the KV, or after the state."""
        ends = (0, *header.ends)
        return header.data_start + ends[-1 if with_state else self._destination.num_kv_tensors(header)]

    def _shared(self, name: FileName, with_state: bool) -> LoadedSegment | None:
        """Return a segment that another caller has still in memory, with its state if that is asked for."""
        whole = self._segments.get((name, True))
        return whole if whole or with_state else self._segments.get((name, False))

    def _end_with_state(self, chain: Chain, segments: list[LoadedSegment]) -> None:
        """Read the last state of the files before a bad one, and forget those of them that have become bad."""
        for at in reversed(range(len(segments))):
            name = segments[at].header.name
            if name.has_state:
                if whole := self._read_segment(name, chain, with_state=True):
                    segments[at] = whole
                    return
                del segments[at:]

    def _is_wanted(self, reference: "weakref.ref[ChainReading]") -> bool:
        reading = reference()
        return reading is not None and not reading.done and not self._closed.is_set()

    def _read_segment(self, name: FileName, chain: Chain, with_state: bool) -> LoadedSegment | None:
        """Read the KV of a file, and its state if `with_state`, and mark it as used. Returns None if it is gone, cannot
        be read, or is bad: then it is removed."""
        path = self._folder.path / str(name)
        try:
            with path.open("rb", buffering=0) as file:
                header = read_header(file, name, self._encryption)
                if (header.namespace, header.tokens) != (chain.namespace, chain.tokens[name.start : name.end]):
                    raise BadFile("it holds other tokens")
                count = None if with_state else self._destination.num_kv_tensors(header)
                buffers = read_tensors(file, header, self._destination.allocate, self._checksums, self._pace, count)
                arrays = self._destination.decode(header, buffers, self._pace)
        except BadFile as error:
            logger.warning("prefixes on disk: %s is removed: %s", path.name, error)
            self._index.discard(name)
            if not self._folder.remove(name):
                self._leave_alone(name)
            return None
        except FileNotFoundError:  # removed for space by another worker
            self._index.discard(name)
            return None
        except (OSError, LookupError, TypeError) as error:
            logger.warning("prefixes on disk: %s cannot be read: %s", path.name, error)
            if isinstance(error, OSError) and error.errno in _TEMPORARY_ERRORS:
                self._index.discard(name)
            else:
                self._leave_alone(name)
            return None
        except (MemoryError, RuntimeError, ValueError) as error:  # MLX raises any of them if there is no memory
            logger.warning("prefixes on disk: %s is not read now: %s", path.name, error)
            self._index.discard(name)  # until the next scan
            return None
        self._folder.touch(name)
        self._on_hit(name)
        return LoadedSegment(header, tuple(arrays), with_state)

    def _leave_alone(self, name: FileName) -> None:
        """Do not read a file again before it changes."""
        self._folder.leave_alone(name)
        self._index.discard(name)
