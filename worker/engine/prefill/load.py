"""The stage of a prompt in which a part of it is loaded from disk into the prefix cache."""

import time

from worker.engine.prefill.stage import Ended, Phase, Stage, StageProgress
from worker.engine.prefix.cache import PrefixCache, StartedLoad
from worker.outcomes import Loaded
from worker.prefix_store.policy import LoadLimit
from worker.request import GenerationRequest


class Load(Stage):
    """Waits for another thread to read the prefix, and inserts it into the prefix cache, from which the prompt is then
    loaded like any other. If it does not fit there, it is loaded into the row's own cache. Not needed if the disk holds
    no more than memory, or if computing is expected to be faster. Given up if it takes longer than that."""

    phase: Phase = Loaded.phase
    before_prefix = True
    takes_chunk = False

    def __init__(
        self, request: GenerationRequest, tokens: int, prefix: PrefixCache, limit_of: LoadLimit, row_bytes: int
    ) -> None:
        """`tokens`: number of first tokens that may be loaded. `row_bytes`: bytes that are reserved for the row's
        cache."""
        self._id = request.id
        self._namespace = request.namespace
        self._key = request.cache_key(request.tokens[:tokens])
        self._prefix = prefix
        self._limit_of = limit_of
        self._row_bytes = row_bytes
        self._decided = False
        self._reported = False
        self._load: StartedLoad | None = None
        self._began_s = 0.0
        self._start = 0

    @property
    def total(self) -> int:
        """Tokens of the prefix in memory after the stage."""
        return len(self._load.reading.chain.tokens) if self._load else self._start

    @property
    def remaining(self) -> int:
        """Tokens left to load."""
        return self.total - self._start

    @property
    def report(self) -> Loaded:
        """The progress of the loading."""
        return Loaded(self._id, self.done, self.total)

    @property
    def needed(self) -> bool:
        """True while the prefix is read."""
        return self._load is not None

    @property
    def ready(self) -> bool:
        """True if the prefix has been read or takes too long, and once before, to report that it is read."""
        return not self._reported or self._load is None or self._load.reading.done or self._is_late(self._load)

    def _is_late(self, load: StartedLoad) -> bool:
        return time.monotonic() - self._began_s >= load.limit_s

    @property
    def held_tokens(self) -> int:
        """Tokens that are read, which take as much memory as in a cache."""
        return self.remaining

    def refresh(self, start: int) -> None:
        """Decide once if the prefix is loaded, and start to read it. `start`: see `Stage.refresh`."""
        if self._decided:
            return
        self._decided = True
        self._start = min(start, len(self._key))
        self._began_s = time.monotonic()
        self._load = self._prefix.read(self._namespace, self._key, self._limit_of) or self._prefix.read_for_row(
            self._namespace, self._key, self._limit_of, self._row_bytes
        )

    def advance(self, tokens: int) -> StageProgress | Ended:
        """Insert what was read into the prefix cache, or give up. Blocks while the memory of a part is copied, if the
        prefix cache has divided it otherwise."""
        assert self._load is not None, "the stage has ended"
        self._reported = True
        load = self._load
        if load.reading.done:
            return self._insert(load)
        if not self._is_late(load):
            return StageProgress(0)
        assert self._prefix.disk is not None, "what was read is on disk"
        self._prefix.disk.store.reader.give_up(load.reading, time.monotonic() - self._began_s)
        self._load = None
        return Ended(0)

    def _insert(self, load: StartedLoad) -> Ended:
        if load.for_row:
            loaded = self._prefix.restore_row(load.reading, len(self._key))
            length = loaded[1] if loaded else 0
        else:
            loaded = None
            length = self._prefix.insert_read(load.reading)
        gained = max(0, length - self._start)
        self._start += gained
        self._load = None
        return Ended(gained, loaded=loaded if gained else None)
