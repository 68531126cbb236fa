"""Embedding models: loaded by mlx-embeddings, and computed in batches of inputs of one length.

A forward has no padding and no mask, as the library's call for a single text: so a row depends on its own tokens alone.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.engine.checkpoint import read_config, read_json, refuse_code, told_as
from worker.engine.isolation import EngineBroken, isolate, logger
from worker.engine.memory import format_bytes
from worker.engine.model.load import (
    EMBEDDING_FILES,
    OnLoaded,
    context_of,
    fingerprint,
    load_weights,
    model_folder,
    not_served,
    why_not_downloaded,
)
from worker.engine.upstream.hub import TransportError, snapshot_download
from worker.errors import CannotStart
from worker.host.courtesy import Throttle
from worker.outcomes import Embedded, NotStored, Outcome, RowFailed, StepReport, StoreResult
from worker.request import EmbeddingInputs

INSTALL = "pip install -e './sluice[cli]' -e '.[worker,embeddings]'"


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """A loaded embedding model. Only the engine's thread computes with its network."""

    network: nn.Module
    tokenizer: Any  # mlx-embeddings' wrapper of transformers'
    fingerprint: str
    context: int  # tokens of an input
    vocab: int
    dimensions: int
    costs: "EmbeddingCosts"


@dataclass(frozen=True, slots=True)
class EmbeddingCosts:
    """Predicts the memory of a forward. Attention may materialize the scores of all heads."""

    weights_bytes: int
    token_bytes: int  # in a layer, all of whose values are float32 at most
    heads: int

    @classmethod
    def of(cls, config: dict[str, Any], weights_bytes: int) -> "EmbeddingCosts":
        """Return the costs of a model by its config. Some twenty arrays as wide as the model or its MLP live at once,
        as `tests/engine/test_embedding.py` measures."""
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        width = max(hidden, heads * int(config.get("head_dim") or 0))
        return cls(weights_bytes, 4 * (16 * width + 6 * int(config["intermediate_size"])), heads)

    def forward_bytes(self, rows: int, tokens: int) -> int:
        """Return the bytes of a forward of rows of so many tokens, besides the weights."""
        scores = 4 * 4 * self.heads * tokens  # in float32, with their mask, their softmax and a copy
        return rows * tokens * (self.token_bytes + scores)

    def longest(self, memory: int) -> int:
        """Return the tokens of the longest row that fits into the memory together with the weights."""
        scores, left = 16 * self.heads, max(0, memory - self.weights_bytes)
        return int((math.sqrt(self.token_bytes**2 + 4 * scores * left) - self.token_bytes) / (2 * scores))


def check_embedding_model(folder: Path, path_or_hub_id: str, *, trusted: bool) -> tuple[EmbeddingCosts, int]:
    """Return what an embedding model takes, and the tokens of its longest input, without reading a weight. `folder`:
    its files, those of the weights only if they are downloaded. Blocks. Raises `CannotStart`."""
    config = _config_of(folder, path_or_hub_id, trusted=trusted)
    weights = [file.stat().st_size for file in folder.rglob("*.safetensors")]
    if not weights:
        if Path(path_or_hub_id).expanduser().is_dir():
            raise CannotStart(f"{path_or_hub_id} has no weights: mlx-embeddings reads model*.safetensors.")
        try:
            files = snapshot_download(path_or_hub_id, allow_patterns=["*.safetensors"], dry_run=True)
        except (OSError, ValueError, TransportError) as error:  # DryRunError is an OSError
            raise CannotStart(f"{path_or_hub_id}: {why_not_downloaded(error)}") from error
        weights = [file.file_size or 0 for file in files]
    with told_as(lambda reason: f"mlx-embeddings cannot load {path_or_hub_id}: {reason}"):
        return EmbeddingCosts.of(config, sum(weights)), context_of(config)


def _config_of(folder: Path, name: str, *, trusted: bool) -> dict[str, Any]:
    """Return the config of an embedding model. Raises `CannotStart` for one that could not be loaded here."""
    config = read_config(folder, name)
    if not trusted:
        refuse_code(folder, "auto_map")
    try:
        from worker.engine.upstream import mlx_embeddings  # noqa: F401
    except ModuleNotFoundError as missing:
        message = f"{name} is an embedding model, which needs the package {missing.name}: {INSTALL}"
        raise CannotStart(message) from None
    return config


def open_embedding_model(
    path_or_hub_id: str, *, memory: int, context: int | None, trusted: bool, on_loaded: OnLoaded | None = None
) -> EmbeddingModel:
    """Load an embedding model with its weights. Blocks; must run on the thread that will compute. `memory`: bytes that
    it may use; `context`: the most tokens of an input, None: the model's. Raises `CannotStart`."""
    folder = model_folder(path_or_hub_id, name=f"SLUICE_MODEL={path_or_hub_id}", only=EMBEDDING_FILES)
    config = _config_of(folder, path_or_hub_id, trusted=trusted)
    from worker.engine.upstream import mlx_embeddings

    with told_as(lambda reason: f"mlx-embeddings cannot load {path_or_hub_id}: {reason}"):
        network = mlx_embeddings.load_model(folder, lazy=True, path_to_repo=str(folder))
        load_weights(network, on_loaded)
        tokenizer = mlx_embeddings.load_tokenizer(folder)
        weights_bytes = sum(array.nbytes for _, array in tree_flatten(network.parameters()))
        costs = EmbeddingCosts.of(config, weights_bytes)
        trial = network(mx.array([[0]])).text_embeds
        if trial.ndim != 2:
            raise ValueError("it makes a vector of each token, and not one of a text")
        known = _known_context(config, tokenizer)
    longest = min(known, context or known)
    if costs.longest(memory) < longest:
        fits = costs.longest(memory)
        if fits < 1:
            reason = f"Its weights take {format_bytes(weights_bytes)} of the {format_bytes(memory)} that it may use."
            raise not_served(path_or_hub_id, [reason])
        logger.warning("inputs have at most %d tokens instead of %d: longer ones do not fit into memory", fits, longest)
        longest = fits
    _warn_of_pooling(folder)
    return EmbeddingModel(
        network, tokenizer, fingerprint(folder), longest, int(config["vocab_size"]), trial.shape[-1], costs
    )


def _known_context(config: dict[str, Any], tokenizer: Any) -> int:
    """Return the most tokens of an input, those that the tokenizer adds included."""
    positions = context_of(config)
    if config["model_type"] == "xlm-roberta":  # its positions begin after that of the padding
        positions -= int(config.get("pad_token_id", 1)) + 1
    return min(positions, int(tokenizer.model_max_length))  # of a tokenizer without one: 10^30


def _warn_of_pooling(folder: Path) -> None:
    """Log if sentence-transformers would make another vector of the text than mlx-embeddings does."""
    asked = read_json(folder, "1_Pooling/config.json")
    if (
        asked.get("pooling_mode_cls_token") is True
        and read_json(folder, "config.json").get("model_type") != "modernbert"
    ):
        logger.warning("its 1_Pooling/config.json asks for the first token's vector, and mlx-embeddings takes the mean")


@dataclass(slots=True)
class _Waiting:
    """The inputs of a job that are not computed yet."""

    job: EmbeddingInputs
    turn: int  # the step in which it was served last, or came
    left: dict[int, list[int]] = field(default_factory=dict)  # inputs by their length

    @classmethod
    def of(cls, job: EmbeddingInputs, turn: int) -> "_Waiting":
        waiting = cls(job, turn)
        for index, tokens in enumerate(job.tokens):
            waiting.left.setdefault(len(tokens), []).append(index)
        return waiting

    def take(self, length: int, most: int) -> list[int]:
        """Remove and return inputs of this length."""
        found = self.left.get(length, [])
        taken = found[:most]
        del found[:most]
        if not found:
            self.left.pop(length, None)
        return taken


_Row = tuple[EmbeddingInputs, int]  # an input of a job


class EmbeddingEngine:
    """Computes the inputs of many jobs together. For one thread, the one that loaded the model.

    Interactive jobs come first; tenants take turns, and the jobs of a tenant. A step is one forward, of inputs of one
    length: the longest of the job whose turn it is, and as many of the others' as fit."""

    def __init__(self, model: EmbeddingModel, memory: int) -> None:
        """`memory`: bytes that the model may use with all that it computes."""
        self._network, self._costs = model.network, model.costs
        self._left_bytes = memory - model.costs.weights_bytes
        self._jobs: dict[str, _Waiting] = {}
        self._turns: dict[str, int] = {}  # of tenants: the step in which each was served last, or came
        self._steps, self._failures = 0, 0
        self._throttle = Throttle()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def needs_step(self) -> bool:
        return bool(self._jobs)

    @property
    def share(self) -> float:
        """Share of the time that steps may take now."""
        return self._throttle.share_for(each.job.lane for each in self._jobs.values())

    def set_throttle(self, throttle: Throttle) -> None:
        """Set what is left to others. It holds no memory between its steps but MLX's buffers, which it gives back."""
        self._throttle = throttle
        mx.clear_cache()

    def add(self, request: Any) -> None:
        """Add a job."""
        before = self._steps - 1  # its turn is before that of the one that was served last
        self._jobs[request.id] = _Waiting.of(request, before)
        self._turns.setdefault(request.tenant, before)

    def remove(self, id: str) -> None:
        """Remove a job in any state. An unknown id is ignored."""
        self._jobs.pop(id, None)
        if len(self._turns) > 1_000:  # tenants come and go; those that do not wait begin again
            waiting = {each.job.tenant for each in self._jobs.values()}
            self._turns = {tenant: turn for tenant, turn in self._turns.items() if tenant in waiting}

    def store_prefix(self, namespace: str, tokens: tuple[int, ...], attempt: object = None) -> StoreResult:
        """Store nothing: an embedding has no prefix."""
        return StoreResult(0, missing=NotStored.NOT_CACHED)

    def close(self) -> None:
        """Do nothing: it holds no files."""

    def step(self) -> StepReport:
        """Compute one batch. Blocks. Raises `EngineBroken` after repeated failures."""
        began, batch = time.perf_counter(), self._next_batch()
        outcomes = tuple(self._computed(batch))
        if self._failures >= 10:  # as of `Engine`
            raise EngineBroken(f"{self._failures} failures without an embedding between them")
        return StepReport(outcomes, len(batch), time.perf_counter() - began)

    def _next_batch(self) -> list[_Row]:
        """Take the inputs of the next forward from their jobs."""
        self._steps += 1
        interactive = [each for each in self._jobs.values() if each.job.lane == "interactive"]
        jobs = sorted(interactive or self._jobs.values(), key=lambda each: (self._turns[each.job.tenant], each.turn))
        first = jobs[0]
        first.turn = self._turns[first.job.tenant] = self._steps
        length = max(first.left)
        batch, most = list[_Row](), self._most_rows(length)
        for each in jobs:
            batch += [(each.job, index) for index in each.take(length, most - len(batch))]
            if not each.left:
                del self._jobs[each.job.id]
        return batch

    def _most_rows(self, tokens: int) -> int:
        """Return how many rows of so many tokens one forward has."""
        fits = self._left_bytes // self._costs.forward_bytes(1, tokens)
        most_tokens = 4_096  # enough to use a GPU well, and few enough for another job to come soon
        return max(1, min(most_tokens // tokens, fits))

    def _computed(self, batch: Sequence[_Row]) -> Iterator[Outcome]:
        """Yield the outcomes of a batch. If it fails, its rows are computed again, each alone."""
        with isolate("a batch of embeddings") as attempt:
            vectors = self._forward(batch)
        if not attempt.failed:
            self._failures = 0
            yield from map(self._outcome, batch, vectors)
        elif len(batch) > 1:
            mx.clear_cache()  # it may have been a lack of memory
            for row in batch:
                yield from self._computed([row])
        else:
            self._failures += 1
            yield self._failed(batch[0][0].id)

    def _forward(self, batch: Sequence[_Row]) -> list[bytes]:
        vectors = self._network(mx.array([job.tokens[index] for job, index in batch])).text_embeds.astype(mx.float32)
        finite = mx.isfinite(vectors).all(axis=-1)
        mx.eval(vectors, finite)
        data, size = memoryview(vectors).tobytes(), 4 * vectors.shape[-1]
        flags: Any = finite.tolist()
        rows = (data[start : start + size] for start in range(0, len(data), size))
        return [row if is_finite else b"" for row, is_finite in zip(rows, flags, strict=True)]

    def _outcome(self, row: _Row, vector: bytes) -> Outcome:
        job, index = row
        if not vector:
            logger.error("%s: the embedding of input %d is not finite", job.id, index)
            return self._failed(job.id)
        return Embedded(job.id, index, vector)

    def _failed(self, id: str) -> RowFailed:
        self._jobs.pop(id, None)
        return RowFailed(id)
