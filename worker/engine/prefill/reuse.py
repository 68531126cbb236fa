"""The use of a prefix cache by one prompt."""

from typing import Any

from worker.engine.prefix.cache import PrefixCache
from worker.engine.prefix.tree import CLOSE_TOKENS, MAX_SEGMENT_TOKENS
from worker.prefix_store.policy import LoadLimit
from worker.request import GenerationRequest

# Two prompts that have at least this many uncached tokens in common do not compute them at the same time.
_BEGINNING = 32

Beginning = tuple[str, int, tuple[int, ...]]


class PrefixReuse:
    """Finds, loads and inserts the first tokens of a prompt, those before the first dropped one. For one `PromptTask`,
    the only user of the prefix cache during prefill."""

    def __init__(
        self,
        cache: PrefixCache | None,
        request: GenerationRequest,
        tokens: int,
        *,
        done: int = 0,
        inserts: bool = True,
        shared: int = 0,
    ) -> None:
        """`tokens`: number of first tokens that may be loaded and inserted; `done` of them are computed. `inserts`:
        False if nothing is to be inserted. `shared`: see `share`."""
        self._cache, self._inserts = cache, inserts
        self._namespace, self._key = request.namespace, request.cache_key(request.tokens[:tokens])
        self._boundaries, self._end = request.boundaries, len(request.tokens) - 1
        self._version, self._inserted = -1, done
        self._known = self._on_disk = 0
        self._shared = shared
        self.matched = 0  # length of the longest cached prefix, until it is loaded
        self._partings: list[int] | None = None
        self.cuts: tuple[int, ...] = ()  # positions, ascending, at which a forward has to end
        self._cut()

    def match(self) -> None:
        """Find the longest cached prefix again if the prefix cache has changed. Copies nothing."""
        if self._cache and self._version != self._cache.version:
            if self._version < 0:
                disk = self._cache.disk if self._cache.stateful else None
                self._on_disk = disk.known_end(self._namespace, self._key) if disk else 0
            self._version = self._cache.version
            self.matched, self._known = self._cache.match(self._namespace, self._key)
            self._cut()

    def share(self, tokens: int) -> None:
        """Let a forward end after the first `tokens` tokens: a prompt that is computed at the same time shares them."""
        self._shared = max(self._shared, tokens)
        self._cut()

    def _cut(self) -> None:
        """Choose the cuts again if the prompt parts from known ones at other positions than before."""
        if not (self._cache and self._inserts):
            return
        found = max(self.matched, self._inserted)
        partings = [at for at in (self._known, self._on_disk) if at - found >= CLOSE_TOKENS]
        if self._shared - found >= _BEGINNING:  # else both are computed in one forward, which should not end earlier
            partings.append(self._shared)
        if partings != self._partings:
            self._partings = partings
            cuts = self._cache.checkpoint_positions(self._boundaries, self._end, partings)
            self.cuts = tuple(cut for cut in cuts if cut <= len(self._key))

    def beginning(self, cached: int) -> Beginning | None:
        """Return the first tokens that the cache does not hold, with their namespace and the index of the first; None
        if they are few, or are not inserted. Of prompts with equal ones, only the first need compute them. `cached`:
        number of tokens that were loaded."""
        start = max(self.matched, cached)
        tokens = self._key[start : start + _BEGINNING]
        if self._cache is None or not self._inserts or len(tokens) < _BEGINNING:
            return None
        return self._namespace, start, tokens

    def load(self, done: int) -> tuple[list[Any], int] | None:
        """Return a new cache with the prefix found, and its length, if that exceeds `done`. Blocks."""
        matched, self.matched = self.matched, 0
        if self._cache and matched > done:
            cache, length = self._cache.load(self._namespace, self._key)
            if length > done:  # else a part of it has been evicted
                self._inserted = length
                return cache, length
        return None

    def skip(self, done: int) -> None:
        """Record that the first `done` tokens were loaded otherwise: they are not inserted on their own."""
        self._inserted = done

    def insert_if_due(self, done: int, cache: list[Any]) -> None:
        """Insert the first `done` tokens, which `cache` holds, at checkpoints or every `MAX_SEGMENT_TOKENS`. Blocks."""
        if self._cache and self._inserts and self._is_due(self._cache, done):
            self._cache.insert(self._namespace, self._key[:done], cache)
            self._inserted = done

    def spill(self, done: int, cache: list[Any], limit_of: LoadLimit) -> None:
        """Let the first `done` tokens, which `cache` holds, be written to disk: see `DiskPrefixes.spill_row`."""
        if self._cache and self._cache.disk and self._inserts and 0 < done <= len(self._key):
            self._cache.disk.spill_row(self._namespace, self._key[:done], cache, limit_of)

    def _is_due(self, cache: PrefixCache, done: int) -> bool:
        if cache.stateful:
            return done in self.cuts
        return done == len(self._key) or self._inserted + MAX_SEGMENT_TOKENS <= done < len(self._key)
