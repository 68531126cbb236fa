"""The queue of prompts being prefilled: which advance in a step, by how many tokens, and which in one forward."""

import time
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from worker.engine.batch.decode_batch import PreemptedRow
from worker.engine.batch.row import Row
from worker.engine.cache.pack import Pack, packing_of
from worker.engine.isolation import isolate
from worker.engine.memory import BUFFER_TOKENS, NO_IMAGES, ImageDemand, MemoryModel
from worker.engine.model.load import Model
from worker.engine.model.profile import weights_bytes
from worker.engine.options import EngineOptions
from worker.engine.prefill.caches import EngineCaches
from worker.engine.prefill.load import EncodeImages, Load, LoadImages
from worker.engine.prefill.scoring import DraftScorer
from worker.engine.prefill.spans import ComputeSpans, PackRow, dense_prefix_len, window_of
from worker.engine.prefill.specprefill import Score
from worker.engine.prefill.stage import Phase, Stage
from worker.engine.prefill.task import Advanced, Beginning, PromptTask
from worker.engine.prefix.tree import shared_length
from worker.engine.speculation.mtp import Head
from worker.engine.step.cost import CostEstimate, Forward, PromptChunk, PromptCost
from worker.engine.step.plan import PromptState
from worker.engine.step.planner import RunningRows, StepPlanner
from worker.engine.step.tuning import MAX_CHUNK
from worker.engine.vision.inputs import MultimodalInputs
from worker.outcomes import SpecPrefillSkipped
from worker.prefix_store.policy import LoadSize, load_limit_s
from worker.prefix_store.reader import ReadAhead
from worker.request import GenerationRequest


class PrefillQueue:
    """All prompts that are in a phase before decoding. For the engine's thread."""

    def __init__(self, model: Model, options: EngineOptions, caches: EngineCaches, *, with_head: bool = False) -> None:
        """`caches` stays owned by the caller. `with_head`: compute the entries of the model's MTP head too."""
        self._model = model
        self._head = model.head if with_head else None
        self._network = cast(nn.Module, self._head.trunk) if self._head else model.network
        self._caches = caches
        self._tasks: dict[str, PromptTask] = {}
        # Namespaces, keys in the prefix cache and ids, in order: of all prompts, neighbours share the most tokens.
        self._keys: list[tuple[str, tuple[int, ...], str]] = []
        self._ahead: dict[str, list[ReadAhead]] = {}  # by the ids of requests that wait to be admitted
        self._shared = SharedForwards(self._network, model.costs, self._head)
        self._began_s = 0.0  # time at which the step began
        self._costs: dict[Phase, CostEstimate] = {
            # One layer of a vision encoder counts as a few tokens; until its speed is measured, advance by one token.
            "encoding": CostEstimate(model.costs.encoder.tokens_per_s, least=1),
            "prefill": CostEstimate(),
            "loading": CostEstimate(1e6),  # tokens/s, to insert what another thread has read, until it is measured
        }
        self._planner = StepPlanner(options.step_s, self._costs["prefill"], packed_tokens=model.costs.packed_tokens)
        self._ratio = model.costs.weights_bytes / max(1, weights_bytes(model.draft.network)) if model.draft else 1.0

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def has_work(self) -> bool:
        """True if a prompt can be computed now; the others wait, see `Stage.ready`."""
        return any(task.stage.ready for task in self._tasks.values())

    def __contains__(self, id: str) -> bool:
        return id in self._tasks

    @property
    def lengths(self) -> list[int]:
        """Tokens that the prompts hold in caches, omitting empty ones; see `Stage.held_tokens`."""
        return [tokens for task in self._tasks.values() if (tokens := task.stage.held_tokens)]

    def images(self, id: str) -> ImageDemand:
        """Return the images that the row has still to be computed with; none for an unknown id."""
        return self._tasks[id].images if id in self._tasks else NO_IMAGES

    def cost(self, phase: Phase) -> PromptCost:
        """Return the current estimate of what a chunk in this phase costs."""
        return self._costs[phase].now

    @property
    def token_cost(self) -> tuple[float, float]:
        """Measured seconds of a prompt's token, and of each pair of a token and one before it; 0 before the first."""
        costs = self._costs["prefill"]
        return (costs.now.token_s, costs.now.before_s) if costs.is_measured else (0.0, 0.0)

    # Prompts

    def expect(self, request: GenerationRequest) -> None:
        """Let the disk begin with the prefix of a request that waits to be admitted, until it is added or removed."""
        if self._caches.prefix is None or not self._caches.may_load(request):
            return
        with isolate(f"{request.id}: reading a prefix ahead"):
            dense = len(request.tokens) if request.kept_ranges is None else dense_prefix_len(request.kept_ranges)
            key = request.cache_key(request.tokens[: min(dense, len(request.tokens) - 1)])
            prefix = self._caches.prefix.read_ahead(request.namespace, key, self._load_limit_s)
            ahead = [prefix] if prefix else []
            if request.images:
                in_memory = self._caches.prefix.match_length(request.namespace, key)
                start = len(prefix.chain.tokens) if prefix else in_memory
                ahead += self._caches.read_images_ahead(request, start, self._image_load_limit_s)
            if ahead:
                self._ahead[request.id] = ahead

    def add(self, row: Row) -> None:
        """Add a row whose prompt is to be prefilled. Raises ValueError for images or kept ranges that do not match the
        prompt."""
        self._ahead.pop(row.id, None)
        inputs = self._inputs_of(row.request) if row.request.images else None
        spans = ComputeSpans(self._network, row.request, inputs, head=self._head)
        first = [*self._first_stages(row, spans.num_dense, inputs)]
        if self._caches.draft:
            first += self._score_stages(row.request, self._caches.draft, window_of(spans.cache))
        task = PromptTask(row, spans, first=first, prefix=self._caches.prefix, added_s=time.monotonic())
        self._tasks[row.id] = task
        if self._caches.prefix and self._caches.prefix.stateful and row.request.kept_ranges is None:
            self._find_sharing(task)

    def _find_sharing(self, task: PromptTask) -> None:
        """Let a snapshot be taken where the prompt parts from another one that is computed at the same time: the prefix
        cache does not know it yet."""
        request = task.row.request
        key = request.namespace, request.cache_key(request.tokens[:-1]), request.id
        at = bisect(self._keys, key)
        for namespace, tokens, id in self._keys[max(0, at - 1) : at + 1]:
            if namespace == request.namespace:
                shared = shared_length(tokens, key[1])
                task.share(shared)
                self._tasks[id].share(shared)
        self._keys.insert(at, key)

    def _inputs_of(self, request: GenerationRequest) -> MultimodalInputs:
        vision, features = self._model.vision, self._caches.features
        assert vision is not None and features is not None, "a text model has no images"  # noqa: PT018
        return MultimodalInputs(vision.family, request, features)

    def _first_stages(self, row: Row, dense: int, inputs: MultimodalInputs | None) -> Iterator[Stage]:
        """Yield the stages that load a prefix, load the features of images, and encode images, as far as there may be
        such work. `dense`: number of first tokens that may be loaded."""
        load = None
        if (prefix := self._caches.prefix) and self._caches.may_load(row.request):
            row_bytes = self._model.costs.row_bytes(row.end)
            load = Load(row.request, dense, prefix, self._load_limit_s, row_bytes)
            yield load
        if inputs is None:
            return
        assert self._model.vision is not None
        if load and self._caches.features and (stored := self._caches.features.stored):
            token_bytes = self._model.costs.token_bytes
            yield LoadImages(row.request, inputs, stored, self._image_load_limit_s, load, token_bytes)
        yield EncodeImages(row.id, inputs, self._model.vision.family.encode)

    def _score_stages(self, request: GenerationRequest, draft: DraftScorer, window: int) -> list[Stage]:
        """Return the stage that may score the prompt. There is none if nothing may be dropped, or if an earlier attempt
        has chosen the tokens to keep or has computed all of them."""
        if request.specprefill is None or request.kept_ranges is not None or request.resume_tokens:
            return []
        # Until it is measured, the draft counts as faster than the model by the ratio of their sizes. Its estimate is
        # created with the first prompt that may be scored: by then the model has most likely been measured.
        self._costs.setdefault("scoring", CostEstimate(self._ratio / max(self.cost("prefill").token_s, 1e-9)))
        return [Score(request, request.specprefill, draft, self._is_worthwhile, window, self._model.costs.draft_tokens)]

    def _load_limit_s(self, load: LoadSize) -> float | None:
        return load_limit_s(load, self.cost("prefill").chunk_s(load.tokens, load.start))

    def _image_load_limit_s(self, load: LoadSize) -> float | None:
        # Even a small image takes a whole run of the encoder.
        return load_limit_s(load, self.cost("encoding").chunk_s(load.tokens, load.start), min_tokens=0)

    def _is_worthwhile(self, scored: int, tokens: int, keep: float) -> bool:
        """Return True if scoring `scored` tokens, and then computing the share `keep` of `tokens`, is expected to be
        faster than computing all of them."""
        target, draft = self.cost("prefill"), self.cost("scoring")
        return draft.chunk_s(scored, 0) + target.chunk_s(int(keep * tokens), 0) < target.chunk_s(tokens, 0)

    def remove(self, id: str) -> None:
        """Drop a prompt and what it has computed, or what is read ahead for it. An unknown id is ignored."""
        if task := self._pop(id):
            self._caches.mark(task.row.request)
        self._ahead.pop(id, None)

    def _pop(self, id: str) -> PromptTask | None:
        self._keys = [key for key in self._keys if key[2] != id]
        return self._tasks.pop(id, None)

    def spill(self, id: str) -> None:
        """Let what a prompt has computed be written to disk: see `DiskPrefixes.spill_row`. An unknown id is ignored."""
        if id in self._tasks:
            self._tasks[id].spill(self._load_limit_s)

    def spill_rows(self, dropped: Iterable[PreemptedRow]) -> None:
        """Let the caches of rows that were decoding be written to disk: see `DiskPrefixes.spill_row`."""
        for preempted in dropped:
            self._caches.spill(preempted, self._load_limit_s)

    def pop_computed(self, id: str) -> PromptTask | None:
        """Remove and return the prompt if nothing is left to compute; else return None."""
        return self._pop(id) if self._tasks[id].is_computed else None

    # Costs

    def observe_join(self, tokens: int, growth: int, seconds: float) -> None:
        """Record the measured seconds of a row's join: see `CostEstimate.observe_join`."""
        self._costs["prefill"].observe_join(tokens, growth, seconds)

    def observe_gap(self, seconds: float) -> None:
        """Record the measured seconds between the reports of this step and of the last one."""
        self._planner.observe_gap(seconds)

    # Steps

    def begin_step(self, forward_s: float) -> None:
        """Find what prefix caches now hold of each prompt, and decide which new prompts are scored. `forward_s`:
        estimated seconds of a pass over the weights."""
        self._planner.begin_step()
        self._began_s = time.monotonic()
        self._costs["prefill"].observe_forward(forward_s)
        self._refresh()

    def _refresh(self) -> None:
        for task in self._tasks.values():
            task.refresh()

    def plan(self, running: RunningRows, elapsed_s: float, longest: int) -> list[Forward]:
        """Return the forwards to compute in this step, for prompts whose stage is ready. `elapsed_s`: seconds since the
        last step's report. `longest`: most tokens of a forward."""
        # With hundreds of prompts, values shared by many are computed once.
        cost_of = cache(self.cost)
        copied, added = cache(running.join_copy_bytes), cache(running.added_step_s if running.started else _nothing)
        ready = [task for task in self._tasks.values() if task.stage.ready]
        packs = self._shared.keys(ready)
        prompts = [self._state_of(task, packs[task.row.id], cost_of, copied, added) for task in ready]
        return self._planner.plan(prompts, running, elapsed_s, longest)

    def delays_first_step(self, running: RunningRows, delayed_s: float) -> bool:
        """Return True if rows of which none has begun its answer should wait for another interactive prompt: see
        `delays_first_step` of `step.planner`. `delayed_s`: seconds since the first of these rows joined."""
        stages = [task.stage for task in self._tasks.values() if task.row.request.lane == "interactive"]
        computable = [stage for stage in stages if stage.phase == "prefill" and stage.ready]
        waiting = ((stage.remaining, stage.done) for stage in computable)
        return self._planner.delays_first_step(running, delayed_s, waiting)

    def _state_of(
        self,
        task: PromptTask,
        pack: int | None,
        cost_of: Callable[[Phase], PromptCost],
        join_copy_bytes_of: Callable[[int], int],
        added_step_s_of: Callable[[int], float],
    ) -> PromptState:
        """Return the state of a prompt, as a step is planned from it."""
        stage, request = task.stage, task.row.request
        buffer = -(-stage.total // BUFFER_TOKENS) * BUFFER_TOKENS  # buffers grow in these steps
        return PromptState(
            id=request.id,
            done=stage.done,
            remaining=stage.remaining,
            waited_s=self._began_s - task.added_s,
            lane=request.lane,
            cost=cost_of(stage.phase),
            cuts=task.cuts,
            join_copy_bytes=join_copy_bytes_of(buffer),
            added_decode_s=added_step_s_of(buffer),
            phase=stage.phase,
            started=stage.started,
            exclusive=stage.exclusive,
            pack=pack,
            padded=self._shared.padded,
        )

    def compute_together(self, forward: Forward, longest: int) -> int:
        """Compute the chunks of several prompts in one forward; `advance` then adds each to its prompt's cache, or
        computes it alone if this was impossible or has failed. Returns the tokens of a single prompt's chunk that takes
        as much memory. Blocks. `longest`: most tokens of a forward."""
        chunks = [(self._tasks[chunk.id], chunk.tokens) for chunk in forward.chunks]
        shared = None
        with isolate(f"a prompt chunk of {', '.join(chunk.id for chunk in forward.chunks)}") as attempt:
            shared = self._shared.compute(chunks, longest)
        if attempt.failed:  # any of them may be the cause
            for task, _ in chunks:
                task.compute_alone()
        if shared is None:
            return 0
        self._costs["prefill"].observe_chunk(shared.tokens, mean(shared.done), shared.seconds, rows=len(shared.done))
        return shared.memory_tokens

    def advance(self, chunk: PromptChunk) -> Advanced:
        """Compute a chunk, or take it from a forward that it shared with others. Blocks."""
        done = self._tasks[chunk.id].advance(chunk.tokens)
        if done.images != NO_IMAGES:  # other prompts may need the same image
            self._refresh()
        # If SpecPrefill was skipped in this step, the time is not that of the chunk alone.
        skipped = any(isinstance(outcome, SpecPrefillSkipped) for outcome in done.outcomes)
        if done.tokens and not done.shared and not skipped:
            self._costs[done.phase].observe_chunk(done.tokens, done.done, done.seconds, cuts=done.cuts)
        return done


def _nothing(length: int) -> float:
    """Return 0: no row decodes that a join could slow down."""
    return 0.0


@dataclass(frozen=True, slots=True)
class _Shared:
    """A forward of several prompts."""

    done: tuple[int, ...]  # tokens that each prompt held before
    tokens: int  # of the longest chunk; the others were padded to it
    memory_tokens: int  # tokens of a single prompt's chunk that takes as much memory
    seconds: float


class SharedForwards:
    """Computes chunks of several prompts in one forward. For the engine's thread."""

    def __init__(self, network: nn.Module, costs: MemoryModel, head: Head | None = None) -> None:
        """`costs`: predicts the memory of a forward. `head`: an MTP head, whose trunk is the network."""
        self._network = network
        self._head = head
        self._costs = costs
        self._packing = packing_of(network)

    def keys(self, tasks: Iterable[PromptTask]) -> dict[str, int | None]:
        """Return a value for each prompt, by its id, that is equal for prompts that can share a forward now; None if a
        prompt can share none. Of prompts that begin alike, only the first is packed."""
        beginnings = set[Beginning]()
        keys = dict[str, int | None]()
        for task in tasks:
            stage, beginning = task.stage, task.beginning
            alone = not task.can_share or beginning in beginnings
            keys[task.row.id] = None if alone else self._packing.key(stage.done)
            if beginning:
                beginnings.add(beginning)
        return keys

    @property
    def padded(self) -> bool:
        """True if prompts can share a forward in which they compute different numbers of tokens."""
        return self._packing.padded

    def compute(self, chunks: Sequence[tuple[PromptTask, int]], longest: int) -> _Shared | None:
        """Compute the next tokens of these prompts, of each so many, in one forward, and hand them to the tasks, which
        take them into their caches when they advance. Prompts that cannot share the forward with the first are left
        out. Returns None if nothing was computed. Blocks. `longest`: most tokens of a forward. If it raises, the tasks
        have computed nothing."""
        for task, _ in chunks:
            task.load()
        packed = self._fitting(chunks)
        rows = [*packed.values()]
        done, tokens = tuple(row.length for row in rows), max((len(row.tokens) for row in rows), default=0)
        memory_tokens = self._costs.packed_tokens(len(rows), tokens, max(done, default=0))
        if len(rows) < 2 or memory_tokens > min(longest, MAX_CHUNK):
            return None
        began = time.perf_counter()
        pack = self._computed(rows, tokens)
        hidden = self._head.trunk.take_hidden() if self._head else None
        for index, task in enumerate(packed):
            task.receive(pack, index, len(rows[index].tokens), hidden)
        return _Shared(done, tokens, memory_tokens, time.perf_counter() - began)

    def _fitting(self, chunks: Iterable[tuple[PromptTask, int]]) -> dict[PromptTask, PackRow]:
        """Return the prompts that can share a forward with the first."""
        rows = {task: row for task, tokens in chunks if (row := task.pack_row(tokens))}
        if not rows:
            return {}
        first = next(iter(rows.values()))
        return {task: row for task, row in rows.items() if self._fits(row, first)}

    def _fits(self, row: PackRow, first: PackRow) -> bool:
        key = self._packing.key(row.length)
        equal = len(row.tokens) == len(first.tokens)
        return key is not None and key == self._packing.key(first.length) and (equal or self.padded)

    def _computed(self, rows: Sequence[PackRow], tokens: int) -> Pack:
        pack = Pack([row.cache for row in rows], [row.position for row in rows], [len(row.tokens) for row in rows])
        # A row's own last token as padding: any token would do.
        padded = [[*row.tokens, *row.tokens[-1:] * (tokens - len(row.tokens))] for row in rows]
        self._network(mx.array(padded), cache=pack.layers)
        pack.compute()
        return pack
