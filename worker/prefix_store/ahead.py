"""Files that waiting requests are expected to load, brought into the system's page cache before they are loaded."""

import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from worker.prefix_store.background import Pace
from worker.prefix_store.files.content import will_need
from worker.prefix_store.files.header import BadFile
from worker.prefix_store.files.names import FileName
from worker.prefix_store.index import Chain

_PIECE_BYTES = 1 << 20  # after each, a load that has come meanwhile is first
_MAX_BYTES = 4 << 30  # of requests that wait: the page cache may lose what is read long before its use


class ReadAhead:
    """Files that a waiting request is expected to load. Nothing more of them is read once the caller drops it."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain


class PageCache:
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
        if sum(each.chain.nbytes for each in (*waiting, ahead)) > _MAX_BYTES:
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
