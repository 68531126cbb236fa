"""The stage of a prompt in which a part of it is loaded from disk into the prefix cache."""

from worker.engine.cache.durable import IsWorthwhile
from worker.engine.cache.prefix import PrefixCache
from worker.engine.prefill.stage import Ended, Phase, Progress, Stage
from worker.prefix_store.store import Reading
from worker.schedule.outcomes import Loaded


class Load(Stage):
    """Waits for another thread to read the prefix, and inserts it into the prefix cache, from which the prompt is then
    loaded like any other. Not needed if the disk holds no more than memory, or if computing is expected to be
    faster."""

    phase: Phase = Loaded.phase
    before_prefix = True
    takes_chunk = False

    def __init__(
        self, id: str, namespace: str, key: tuple[int, ...], prefix: PrefixCache, is_worthwhile: IsWorthwhile
    ) -> None:
        """`id`: of the request. `key`: cache key of the tokens that may be loaded."""
        self._id = id
        self._namespace = namespace
        self._key = key
        self._prefix = prefix
        self._is_worthwhile = is_worthwhile
        self._decided = False
        self._reported = False
        self._reading: Reading | None = None
        self._start = 0

    @property
    def total(self) -> int:
        """Tokens of the prefix in memory after the stage."""
        return len(self._reading.chain.tokens) if self._reading else self._start

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
        return self._reading is not None

    @property
    def ready(self) -> bool:
        """True if the prefix has been read, and once before, to report that it is read."""
        return not self._reported or self._reading is None or self._reading.done

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
        self._reading = self._prefix.read_from_disk(self._namespace, self._key, self._is_worthwhile)

    def advance(self, tokens: int) -> Progress | Ended:
        """Insert what was read into the prefix cache. Blocks while the memory of a part is copied, if the prefix cache
        has divided it otherwise."""
        assert self._reading is not None, "the stage has ended"
        self._reported = True
        if not self._reading.done:
            return Progress(0)
        loaded = self._prefix.insert_from_disk(self._reading)
        gained = max(0, loaded - self._start)
        self._start += gained
        self._reading = None
        return Ended(gained)
