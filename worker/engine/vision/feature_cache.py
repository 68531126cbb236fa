"""The cache of image features, in memory and on disk.

On disk they are files of the prefix store like segments of KV, under a path that no prompt has: see `IMAGE_FEATURES`.
So they share its quota, its index, its threads and its encryption with the prefixes."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.byte_lru import ByteLRU, EvictedValue
from worker.engine.isolation import isolate
from worker.engine.prefix.tensors import exact_tensor
from worker.prefix_store.format import StoredSegment
from worker.prefix_store.index import Chain
from worker.prefix_store.names import IMAGE_FEATURES
from worker.prefix_store.policy import LoadSize, writes_early
from worker.prefix_store.reader import ChainReading
from worker.prefix_store.store import PrefixStore
from worker.prefix_store.writer import NewSegment
from worker.request import PromptImage


@dataclass(frozen=True, slots=True)
class Features:
    """The language model's input for one image: a row for each token of its span."""

    rows: mx.array  # (tokens, hidden_size), used instead of the tokens' embeddings
    deepstack: tuple[mx.array, ...] = ()  # the same shape; element i is added to the output of text layer i

    @property
    def tokens(self) -> int:
        """Tokens of the image's span."""
        return self.rows.shape[0]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All arrays, `rows` first."""
        return (self.rows, *self.deepstack)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def is_finite(self) -> bool:
        """True if all values are finite. Blocks."""
        return all(bool(mx.isfinite(array).all()) for array in self.arrays)


Encode = Callable[[Any, list[mx.array]], Features]


class EncoderRun:
    """The run of one image through the encoder. The graph is built at once and evaluated one encoder layer at a time,
    so that a large image delays other work by one layer at most."""

    def __init__(self, image: PromptImage, encode: Encode) -> None:
        """`encode`: build the lazy features from the pixel inputs, and append the output of each encoder layer to the
        list it is given."""
        self.image = image
        layer_outputs = list[mx.array]()
        self._features = encode(image.pixel_inputs, layer_outputs)
        self._pending: list[tuple[mx.array, ...]] = [*((layer,) for layer in layer_outputs), self._features.arrays]
        self._stages = len(self._pending)

    @property
    def remaining(self) -> int:
        """Tokens of the image's span left to compute; 0 only at the end."""
        return self._tokens_in(len(self._pending))

    def advance(self, tokens: int) -> int:
        """Compute about `tokens` tokens in whole layers, at least one layer. Blocks. Returns the number computed."""
        before = self.remaining
        while self._pending:
            mx.eval(self._pending.pop(0))
            if before - self._tokens_in(len(self._pending) - 1) > tokens:
                break
        return before - self.remaining

    def _tokens_in(self, stages: int) -> int:
        """Return the tokens that correspond to `stages` remaining stages, rounded up."""
        return -(-self.image.tokens * stages // self._stages)

    @property
    def features(self) -> Features | None:
        """The features, computed, or None until the encoder is done."""
        return None if self._pending else self._features


class StoredFeatures:
    """Features of images on disk. For the engine's thread."""

    def __init__(self, store: PrefixStore) -> None:
        """`store`: of the model's prefixes."""
        self.store = store

    def write(self, namespace: str, digest: bytes, features: Features) -> bool:
        """Let features be written, unless they are stored. Returns False if too much waits to be written. A failure is
        logged."""
        accepted = True  # after a failure too: another attempt would fail as well
        with isolate("writing the features of an image to disk"):
            path, layout = _path(digest, features.tokens), json.dumps({"buffers": len(features.arrays)})
            content = StoredSegment(namespace, path, layout, tuple(map(exact_tensor, features.arrays)))
            accepted = self.store.writer.write(NewSegment(path, False, content))
        return accepted

    def find(self, namespace: str, image: PromptImage) -> Chain | None:
        """Return the file that holds the features of an image; None if there is none."""
        path = _path(image.digest, image.tokens)
        return self.store.find(namespace, path, longer_than=len(path) - 1, stateful=False)

    def size_of(self, chains: Sequence[Chain]) -> LoadSize:
        """Return the size of the load of these files, each of which holds the features of one image."""
        tokens = sum(len(chain.tokens) for chain in chains)
        file_bytes = tuple(size for chain in chains for size in chain.sizes)
        reader = self.store.reader
        return LoadSize(tokens, 0, file_bytes, reader.bytes_per_s, reader.waiting_bytes(*chains))

    def forget(self, namespace: str, image: PromptImage) -> None:
        """Remove the file of an image, and end the readings of it."""
        self.store.forget(namespace, _path(image.digest, image.tokens))


def restored(reading: ChainReading) -> Features | None:
    """Return the features that were read; None if the file was bad. They share the memory of what was read."""
    if not reading.segments:
        return None
    rows, *deepstack = reading.segments[0].arrays
    return Features(rows, tuple(deepstack))


def _path(digest: bytes, tokens: int) -> tuple[int, ...]:
    return (IMAGE_FEATURES + int.from_bytes(digest, "big"),) * tokens


class FeatureCache(ByteLRU[Features]):
    """Least recently used cache of image features, for the engine's thread. Response times would reveal to one tenant
    which images another has sent, so tenants that are isolated have a namespace each."""

    def __init__(self, max_bytes: int, stored: StoredFeatures | None = None) -> None:
        """`stored`: receives what is evicted, and what is used again; None: it is dropped."""
        super().__init__(max_bytes, self._spill)
        self.stored = stored
        self._uses = dict[tuple[str, bytes], int]()  # of entries, since they were put
        self._handed_over = set[tuple[str, bytes]]()  # entries that were written early

    def use(self, namespace: str, digest: bytes) -> Features | None:
        """Return features for a prompt, as `get` does. Those that are used again are written to disk, so that they
        survive a crash; those that cannot wait to be written now are written at a later use."""
        features = self.get(namespace, digest)
        if features is not None and self.stored:
            key = namespace, digest
            self._uses[key] = self._uses.get(key, 0) + 1
            is_due = writes_early(self._uses[key], handed_over=key in self._handed_over)
            if is_due and self.stored.write(namespace, digest, features):
                self._handed_over.add(key)
        return features

    def write_all(self, until_s: float) -> None:
        """Write all features to disk, the most recently used first, at most until this time.monotonic(). Blocks."""
        if self.stored is None:
            return
        for (namespace, digest), features in reversed(self._entries.items()):
            if not self.stored.store.writer.wait_for_room(features.nbytes, until_s) or not self.stored.write(
                namespace, digest, features
            ):
                break

    def forget_non_finite(self, namespace: str, images: Iterable[PromptImage]) -> None:
        """Drop the features of these images that are not finite, and the files of all of them. Blocks."""
        for image in {image.digest: image for image in images}.values():
            key = namespace, image.digest
            if key in self._entries and not self._entries[key].is_finite:
                self.nbytes -= self._entries.pop(key).nbytes
            self._forget_uses(key)
            if self.stored:
                self.stored.forget(namespace, image)

    def _spill(self, evicted: Sequence[EvictedValue[Features]]) -> None:
        """Let evicted features be written, the most recently used first. What exceeds the write queue is dropped."""
        for namespace, digest, features in reversed(evicted):
            self._forget_uses((namespace, digest))
            if self.stored:
                self.stored.write(namespace, digest, features)

    def _forget_uses(self, key: tuple[str, bytes]) -> None:
        self._uses.pop(key, None)
        self._handed_over.discard(key)
