"""Caches kept across requests: prefixes of the model, prefixes of a draft model, and features of images."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from worker.engine.batch.decode_batch import PreemptedRow
from worker.engine.batch.row import Row
from worker.engine.model.load import Model
from worker.engine.prefill.scoring import DraftScorer
from worker.engine.prefix.cache import PrefixCache
from worker.engine.prefix.disk import DiskPrefixes, Storing
from worker.engine.vision.feature_cache import FeatureCache, StoredFeatures
from worker.host.courtesy import Reclaim
from worker.outcomes import NotStored, PrefixUse, StoreResult
from worker.prefix_store.policy import LoadLimit
from worker.prefix_store.reader import ReadAhead
from worker.request import GenerationRequest


class EngineCaches:
    """Owner of all caches that outlive a request, and of how they divide the bytes. For the engine's thread."""

    def __init__(self, model: Model, max_bytes: int, disk: DiskPrefixes | None = None) -> None:
        """`max_bytes`: bytes for all caches together. A draft model and a vision model each get a quarter of them.
        `disk`: the model's prefixes on disk, whose store has image features too; closed by `close`."""
        self._disk = disk
        draft_bytes = max_bytes // 4 if model.draft else 0
        features_bytes = max_bytes // 4 if model.vision else 0
        prefix_bytes = max_bytes - draft_bytes - features_bytes
        self.prefix = PrefixCache(model.network, prefix_bytes, disk) if max_bytes > 0 else None
        self.draft = _draft_of(model, draft_bytes)
        stored = StoredFeatures(disk.store) if disk else None
        self.features = FeatureCache(features_bytes, stored) if model.vision else None
        caches = (self.prefix, self.draft.prefix if self.draft else None, self.features)
        self._lost: list[str] = []  # marks, without a prefix cache
        self._all = [cache for cache in caches if cache is not None]
        self._max_bytes = max_bytes
        self._most_now, self._half = max_bytes, max_bytes  # less while memory is given back: see `give_back`

    @property
    def nbytes(self) -> int:
        """Bytes that all caches hold now."""
        return sum(cache.nbytes for cache in self._all)

    @property
    def evicted(self) -> int:
        """Number of KV segments, state snapshots and images evicted so far."""
        return sum(cache.evicted for cache in self._all)

    def may_load(self, request: GenerationRequest) -> bool:
        """Return True if a prefix of this request may be loaded from disk. An answer that has begun does not continue
        from KV that is rounded there."""
        return self._disk is not None and (self._disk.exact or not request.resume_tokens)

    def touch(self, requests: Iterable[GenerationRequest]) -> None:
        """Mark the prefixes and images of these requests as most recently used, so that they are evicted last."""
        for request in requests:
            if self.prefix:
                self.prefix.touch(request.namespace, request.cache_key(request.tokens))
            if self.features:
                for image in request.images:
                    self.features.get(request.namespace, image.digest)

    def give_back(self, reclaim: Reclaim) -> None:
        """Hold less from the next `set_limit` on, or as much as before. Half is that of what was held at first."""
        if reclaim == Reclaim.NOTHING:
            self._half = self._max_bytes
        elif self._half == self._max_bytes:
            self._half = self.nbytes // 2
        self._most_now = self._half if reclaim < Reclaim.CACHES else 0

    def set_limit(self, max_bytes: int) -> None:
        """Limit all caches together to `max_bytes`, and evict what exceeds it. Image features come first, then the
        draft's prefixes; the model's prefixes get what is left."""
        max_bytes = min(max_bytes, self._most_now)
        for cache in reversed(self._all):
            cache.set_limit(max_bytes)
            max_bytes -= cache.nbytes

    def insert(self, row: Row, cache_of: Callable[[Row], Iterator[tuple[list[Any], int]]], *ending: int) -> None:
        """Insert a decoding row's prompt and answer into the prefix cache. Blocks. `cache_of`: of the rows. `ending`:
        tokens that it was fed in addition."""
        # An offline request has no next turn, and a prompt with dropped tokens cannot serve other requests.
        if self.prefix and row.request.lane == "interactive" and not row.num_dropped:
            for cache, index in cache_of(row):
                self.prefix.insert(row.request.namespace, row.cache_key(*ending), cache, index)

    def store(self, namespace: str, tokens: tuple[int, ...], attempt: Storing | None) -> StoreResult | Storing:
        """Let the cached prefix of these tokens be written to disk and kept: see `PrefixCache.store`."""
        if self.prefix is None:
            return StoreResult(0, missing=NotStored.NOT_CACHED)
        return self.prefix.store(namespace, tokens, attempt)

    def mark(self, request: GenerationRequest) -> None:
        """Remember the marks of a request whose prompt is computed, or is given up, as far as its tokens are held."""
        if request.marks and self.prefix:
            self.prefix.mark(request.namespace, request.cache_key(request.prompt), request.marks)
        elif request.marks:
            self._lost += [name for name, _ in request.marks]

    def use(self, queried: int, hit: int, evicted: int) -> PrefixUse:
        """Return the use of the caches in a step. `queried`, `hit`, `evicted`: see `PrefixUse`."""
        lost, emptied = self.prefix.take_lost() if self.prefix else ((*self._lost,), False)
        self._lost.clear()
        marks = self.prefix.num_marks if self.prefix else 0
        return PrefixUse(queried, hit, evicted, self.nbytes, marks, lost, emptied)

    def spill(self, preempted: PreemptedRow, limit_of: LoadLimit) -> None:
        """Let the cache of a preempted row be written to disk: see `DiskPrefixes.spill_row`."""
        row = preempted.row
        if self.prefix and self.prefix.disk and not row.num_dropped:
            self.prefix.disk.spill_row(row.request.namespace, row.cache_key(), preempted.snapshot.cache, limit_of)

    def read_images_ahead(self, request: GenerationRequest, start: int, limit_of: LoadLimit) -> list[ReadAhead]:
        """Bring the stored features of a waiting request's images into the system's page cache, if loading them now
        would be worthwhile. `start`: images that end before this index are not needed. Ends if the caller drops the
        returned objects."""
        if self.features is None or self.features.stored is None:
            return []
        stored, namespace = self.features.stored, request.namespace
        wanted = {image.digest: image for image in request.images if image.span[1] > start}
        missing = {digest: image for digest, image in wanted.items() if not self.features.has(namespace, digest)}
        found = [chain for image in missing.values() if (chain := stored.find(namespace, image))]
        is_worthwhile = bool(found) and limit_of(stored.size_of(found)) is not None
        return [stored.store.reader.read_ahead(chain) for chain in found] if is_worthwhile else []

    def close(self) -> None:
        """Write the prefixes to disk, and then image features, if they have a disk, as far as time allows. Blocks. The
        caches must not be used afterwards."""
        if self._disk and self.features:
            self._disk.close(self.features.write_all)
        elif self._disk:
            self._disk.close()

    def forget_non_finite(self, row: Row) -> None:
        """Drop the cached prefixes and image features of this row that are not finite. Blocks."""
        if self.prefix:
            self.prefix.forget_non_finite(row.request.namespace, row.cache_key())
        if self.features:
            self.features.forget_non_finite(row.request.namespace, row.request.images)


def _draft_of(model: Model, prefix_bytes: int) -> DraftScorer | None:
    if model.draft is None:
        return None
    skip_token_id = model.vision.family.placeholder if model.vision else None
    return DraftScorer(model.draft.network, prefix_bytes, model.draft.context, skip_token_id)
