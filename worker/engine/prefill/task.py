"""One prompt before its row decodes: its stages, in order, and its use of the prefix cache."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.engine.batch.decode_batch import ComputedRow
from worker.engine.batch.row import Row
from worker.engine.cache.pack import Pack
from worker.engine.isolation import isolate
from worker.engine.memory import NO_IMAGES, ImageDemand
from worker.engine.prefill.spans import ComputeSpans, PackRow
from worker.engine.prefill.stage import Phase, Stage, StageProgress
from worker.engine.prefix.cache import PrefixCache
from worker.engine.prefix.tree import CLOSE_TOKENS, MAX_SEGMENT_TOKENS
from worker.outcomes import Outcome, SpecPrefillApplied, SpecPrefillSkipped
from worker.prefix_store.policy import LoadLimit
from worker.request import GenerationRequest

# Two prompts that have at least this many uncached tokens in common do not compute them at the same time.
_BEGINNING = 32

Beginning = tuple[str, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A chunk that was computed in one forward with other prompts, and is not in the prompt's own cache yet."""

    pack: Pack
    index: int  # of the prompt among the rows
    tokens: int
    hidden: mx.array | None  # the hidden states of the pack, if the model has an MTP head


@dataclass(frozen=True, slots=True)
class Advanced:
    """Work of one chunk, in one stage."""

    phase: Phase
    done: int  # tokens of the stage before the chunk
    tokens: int  # computed
    chunk: int = 0  # of these, the tokens that took the memory of a prompt's chunk
    images: ImageDemand = NO_IMAGES  # those of the prompt before the chunk, if it encoded images
    cuts: int = 0  # within the chunk; each took a further forward
    seconds: float = 0.0  # without loading from caches
    outcomes: tuple[Outcome, ...] = ()
    shared: bool = False  # computed in one forward with other prompts, which `seconds` does not include


class PromptTask:
    """Takes one prompt through its stages. The last stage computes the row's cache; the task loads what the prefix
    cache holds of it, and inserts what is computed before the first dropped token.

    If a stage with a fallback fails (the scoring, or the computation of the tokens that it has chosen), the whole
    prompt is computed."""

    def __init__(
        self,
        row: Row,
        spans: ComputeSpans,
        *,
        first: Sequence[Stage] = (),
        prefix: PrefixCache | None = None,
        added_s: float = 0.0,
    ) -> None:
        """`spans`: the last stage, for the row's request. `first`: the stages before it. `prefix`: None if no prefix is
        loaded or inserted. `added_s`: the time, as time.monotonic()."""
        self.row = row
        self.added_s = added_s
        self._first, self._prefix = [*first], prefix
        # Tokens that an earlier attempt has dropped are not chosen again, and the row inserts no prefix.
        self._chooses = row.request.kept_ranges is None
        self._outcomes: list[Outcome] = []
        self._packed: _Packed | None = None
        self._alone = False
        self._shared = 0
        self._use(spans)

    def _use(self, spans: ComputeSpans) -> None:
        self._spans = spans
        self._reuse = _PrefixReuse(
            self._prefix,
            self.row.request,
            spans.num_dense,
            done=spans.length,
            inserts=self._chooses,
            shared=self._shared,
        )

    def share(self, tokens: int) -> None:
        """Record that another prompt in prefill has the same first `tokens` tokens: see `_PrefixReuse.share`."""
        self._shared = max(self._shared, tokens)
        self._reuse.share(tokens)

    @property
    def stage(self) -> Stage:
        """The current stage."""
        return next((stage for stage in self._first if stage.needed), self._spans)

    @property
    def cached(self) -> int:
        """Tokens of the row's cache that were loaded from the prefix cache."""
        return self._spans.cached

    @property
    def images(self) -> ImageDemand:
        """The images that the prompt has still to be computed with."""
        return sum((stage.images for stage in self._first), NO_IMAGES)

    @property
    def cuts(self) -> Sequence[int]:
        """Positions of the current stage, ascending, at which a forward has to end."""
        return self._reuse.cuts if self.stage is self._spans else ()

    def refresh(self) -> None:
        """Find the longest cached prefix again if the prefix cache has changed. The first call also decides if the
        prompt is scored. Copies and computes nothing."""
        self._reuse.match()
        self._refresh_stages()

    def _refresh_stages(self) -> None:
        self._spans.expect(self._reuse.matched)
        for stage in self._first:
            with self._or_dense(stage):
                self._conclude(stage.refresh(self._spans.start))

    def load(self) -> None:
        """Load the longest cached prefix, and what the current stage finds in caches of its own. Blocks."""
        self.refresh()
        if self.stage.before_prefix:
            return
        if loaded := self._reuse.load(self._spans.length):
            self._spans.load(*loaded)
        self._refresh_stages()
        with self._or_dense(self.stage):
            self.stage.prepare()

    @property
    def can_share(self) -> bool:
        """True if the prompt's next tokens can be computed in one forward with those of other prompts."""
        return self.stage is self._spans and self._spans.can_share and not self._alone

    def compute_alone(self) -> None:
        """Share no forward with other prompts from now on."""
        self._alone = True

    @property
    def beginning(self) -> Beginning | None:
        """The first tokens that no prefix cache held: see `_PrefixReuse.beginning`."""
        return self._reuse.beginning(self.cached)

    def pack_row(self, tokens: int) -> PackRow | None:
        """Return what a pack needs to compute the next `tokens` tokens; None if they cannot share a forward. Call
        `load` before."""
        spans, end = self._spans, self._spans.length + tokens
        if not self.can_share or end > spans.total or any(spans.length < cut < end for cut in self.cuts):
            return None
        return spans.pack_row(tokens)

    def receive(self, pack: Pack, index: int, tokens: int, hidden: mx.array | None = None) -> None:
        """Accept the next `tokens` tokens, computed as row `index` of a pack; `advance` then takes them from it.
        `hidden`: see `ComputeSpans.unpack`."""
        self._packed = _Packed(pack, index, tokens, hidden)

    def advance(self, tokens: int) -> Advanced:
        """Load the longest cached prefix, then compute up to `tokens` tokens of the current stage, or more if an image
        must be computed in one piece. Tokens that were computed in a pack are only taken from it. Computes nothing if
        that stage has to wait. Blocks."""
        shared = self._packed is not None
        if not shared:
            self.load()
        stage = self.stage
        if not stage.ready:  # although it was when the step was planned
            return Advanced(stage.phase, stage.done, 0)
        images, cuts = stage.images, self.cuts
        done = stage.done
        computed = tokens = min(tokens, stage.remaining)
        began = time.perf_counter()
        with self._or_dense(stage):
            result = self._compute(tokens) if stage is self._spans else stage.advance(tokens)
            computed = result.tokens
            self._conclude(result)
        seconds = time.perf_counter() - began
        self._refresh_stages()
        return Advanced(
            stage.phase,
            done,
            computed,
            chunk=computed if stage.takes_chunk else 0,
            images=images,
            cuts=sum(done < cut < done + computed for cut in cuts),
            seconds=seconds,
            outcomes=self._pop_outcomes(stage),
            shared=shared,
        )

    def _compute(self, tokens: int) -> StageProgress:
        """Compute a chunk in forwards that end at the cuts, and insert into the prefix cache."""
        spans, start = self._spans, self._spans.length
        if packed := self._packed:
            self._packed = None
            result = spans.unpack(packed.pack, packed.index, packed.tokens, packed.hidden)
            self._reuse.insert_if_due(spans.length, spans.cache)
            return result
        end = spans.end_of(tokens)
        while spans.length < end:
            stop = next((cut for cut in self._reuse.cuts if spans.length < cut < end), end)
            spans.advance(stop - spans.length)
            self._reuse.insert_if_due(spans.length, spans.cache)
        return StageProgress(spans.length - start)

    def _conclude(self, result: StageProgress | None) -> None:
        """Apply the choice of tokens to compute, if the result has one, and continue from the cache that it has
        loaded."""
        if result and result.loaded:
            self._spans.load(*result.loaded)
            self._reuse.skip(self._spans.length)
        if result and result.choice:
            self._choose(result.choice)

    def _choose(self, choice: SpecPrefillApplied | SpecPrefillSkipped) -> None:
        match choice:
            case SpecPrefillApplied(kept_ranges=kept_ranges):
                self.row.drop_tokens(kept_ranges)
                self._use(self._spans.narrowed(self.row.request))
            case SpecPrefillSkipped():
                self.row.keep_all_tokens()
        self._first = [stage for stage in self._first if stage.fallback is None]
        self._outcomes.append(choice)

    @contextmanager
    def _or_dense(self, stage: Stage) -> Iterator[None]:
        """Compute the whole prompt instead if this fails and the stage has a fallback."""
        fallback = stage.fallback
        if fallback is None:
            yield
            return
        with isolate(f"{self.row.id}: SpecPrefill") as attempt:
            yield
        if attempt.failed:  # whatever the reason, the whole prompt can still be computed
            self._choose(fallback)
            self._use(self._spans.again(self.row.request))
            self._refresh_stages()  # images that were cached with the prefix may have to be encoded now

    def _pop_outcomes(self, advanced: Stage) -> tuple[Outcome, ...]:
        """Return the choice of tokens, if any, and the progress; also that of the last stage once all is loaded."""
        stage = advanced if advanced in self._first else self._spans
        first = (stage.report,) if stage.before_prefix else ()
        if first and not self.is_computed:
            return first
        outcomes, self._outcomes = self._outcomes, []
        return (*first, *outcomes, self._spans.report if first else stage.report)

    def spill(self, limit_of: LoadLimit) -> None:
        """Let what is computed before the first dropped token be written to disk: see `DiskPrefixes.spill_row`."""
        self._reuse.spill(self._spans.length, self._spans.cache, limit_of)

    @property
    def is_computed(self) -> bool:
        """True if the last stage has nothing left to compute."""
        return self.stage is self._spans and self._spans.remaining == 0

    def finish(self) -> ComputedRow:
        """Return the row, which can decode now. The task must not be used afterwards. Lazy."""
        spans = self._spans
        return ComputedRow(self.row, *spans.finish(self.row), entries=spans.entries, cached=self.cached)


class _PrefixReuse:
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
