"""The disk tier of the prefix cache: segments and snapshots as bytes, and back.

The writer's thread reads the arrays' memory itself, so that handing them over copies nothing: see `tensors`. In the
other direction the reader's thread fills arrays that it allocates. MLX allows both for arrays that are evaluated (a
test holds it)."""

import json
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache.layers import layers
from worker.engine.cache.segments import KVSegment, StateSnapshot, is_sliceable, kv_buffers
from worker.engine.prefix.tensors import (
    decode,
    exact_tensor,
    group_size,
    num_kv_tensors,
    quantized_tensors,
    stored_bytes,
)
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.engine.upstream.streams import clear_streams
from worker.errors import CannotStart
from worker.prefix_store.encryption import NoCryptography
from worker.prefix_store.format import StoredSegment, Tensor
from worker.prefix_store.index import Chain
from worker.prefix_store.reader import LoadedSegment, ReadAhead, Reading
from worker.prefix_store.records import Held
from worker.prefix_store.store import PrefixStore, StoreOptions
from worker.prefix_store.writer import NewSegment, WriteReport

_CLOSE_S = 20.0  # for what is written at shutdown


class DiskTier:
    """Segments and other arrays of one model on disk. For the engine's thread."""

    def __init__(
        self,
        network: nn.Module,
        fingerprint: str,
        options: StoreOptions,
        wake: Callable[[], None],
        *,
        bits: int | None = None,
        token_bytes: int = 0,
    ) -> None:
        """`fingerprint`: of the model and its libraries: see `Model.cache_fingerprint`. `wake`: called on another
        thread when a reading is done. `bits`: of a value of the KV on disk, 8; None: KV is stored exactly.
        `token_bytes`: of the KV of a token in memory, at most; needed with `bits`. Blocks until the folder is listed.
        Raises `CannotStart`."""
        self._network = network
        self._bits = bits
        self._token_bytes = token_bytes
        self._readings = weakref.WeakSet[Reading]()  # that requests hold
        self._kinds = " ".join(type(layer).__name__ for layer in layers(make_prompt_cache(network)))
        stored_as = f" KV of {bits} bits" if bits else ""  # exact prefixes and others are never mixed
        try:
            self._store = store_of(options, f"{fingerprint} {self._kinds}{stored_as}", wake)
            self._store.open()
        except OSError as error:
            raise CannotStart(f"SLUICE_PREFIX_DISK_DIR={options.folder}: {error}; give a writable folder") from error
        except NoCryptography as error:
            raise CannotStart(f"SLUICE_PREFIX_DISK_KEY: {error}") from None

    @property
    def pending_bytes(self) -> int:
        """Bytes of evicted data in memory that wait to be written."""
        return self._store.pending_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that can be handed over now to be written."""
        return self._store.room_bytes

    @property
    def bytes_per_s(self) -> float:
        """Measured speed of reading and decoding, in bytes of files."""
        return self._store.read_bytes_s

    def write(
        self,
        namespace: str,
        path: tuple[int, ...],
        tokens: int,
        segment: KVSegment,
        state: StateSnapshot | None,
        *,
        report: WriteReport | None = None,
    ) -> bool:
        """Let the last `tokens` tokens of a prefix be written, with the state after them, unless they are stored.
        `report`: receives the result; they are then pinned, so that they are not removed for space. Copies nothing.
        Returns False if too much waits to be written."""
        arrays = [*segment.buffers]
        layout: dict[str, Any] = {"kinds": self._kinds, "buffers": len(arrays)}
        layout["state"] = None if state is None else [*_encoded(state, arrays)]
        group_sizes = [group_size(buffer) for buffer in segment.buffers] if self._bits else []
        if self._bits:
            layout |= {"bits": self._bits, "group_sizes": group_sizes}
        tensors = tuple(_tensors(arrays, group_sizes))
        content = StoredSegment(namespace, path[len(path) - tokens :], json.dumps(layout), tensors)
        memory_bytes = sum(array.nbytes for array in arrays)
        pinned = report is not None
        ends_pinned = report is not None and report.end == len(path)
        return self._store.write(
            NewSegment(path, state is not None, content, pinned, ends_pinned, report, memory_bytes=memory_bytes)
        )

    def write_exact(self, namespace: str, path: tuple[int, ...], arrays: Sequence[mx.array]) -> bool:
        """Let arrays that are no KV be written under a path of their own, always exactly, unless they are stored. They
        must be evaluated. Copies nothing. Returns False if too much waits to be written."""
        layout = json.dumps({"buffers": len(arrays)})
        content = StoredSegment(namespace, path, layout, tuple(map(exact_tensor, arrays)))
        return self._store.write(NewSegment(path, False, content))

    def kv_share(self, cache: Sequence[Any]) -> float:
        """Return the bytes that the KV of a cache takes in a file, for each byte that it takes in memory."""
        held_bytes = sum(buffer.nbytes for buffer in kv_buffers(cache))
        return stored_bytes(kv_buffers(cache), self._bits) / held_bytes if held_bytes else 1.0

    def memory_bytes(self, chain: Chain) -> int:
        """Return the most bytes of memory that these files take while they are read, and afterwards."""
        if not self._bits:
            return chain.nbytes
        # Quantized KV is in memory for one file at a time; what else a file holds is a state.
        states = sum(size for name, size in zip(chain.files, chain.sizes, strict=True) if name.has_state)
        kv_bytes = self._token_bytes * (len(chain.tokens) - chain.start)
        return kv_bytes + min(chain.nbytes, states + max(chain.sizes))

    def show(self, held: Held) -> None:
        """Let people see what memory holds: see `PrefixStore.hold`."""
        self._store.hold(held)

    def find(
        self, namespace: str, tokens: tuple[int, ...], *, stateful: bool, held: Collection[int], longer_than: int
    ) -> Chain | None:
        """Return the files of the longest stored prefix; see `Index.find`."""
        return self._store.find(namespace, tokens, stateful=stateful, held=held, longer_than=longer_than)

    def known_end(self, namespace: str, tokens: tuple[int, ...], held: Collection[int]) -> int:
        """Return the last position along these tokens at which a file ends; see `Index.known_end`."""
        return self._store.known_end(namespace, tokens, held)

    def read(self, chain: Chain) -> Reading:
        """Start to read files, or return the reading of the same files that is under way."""
        reading = self._store.read(chain)
        self._readings.add(reading)
        return reading

    def waiting_bytes(self, *chains: Chain) -> int:
        """Return the bytes of the files that are read before those of a load that begins now."""
        own = {chain.files for chain in chains}
        reading = (reading.chain for reading in self._readings if not reading.done)
        return sum(chain.nbytes for chain in reading if chain.files not in own)

    def read_ahead(self, chain: Chain) -> ReadAhead:
        """Bring files into the system's page cache, as long as the caller holds the returned object."""
        return self._store.read_ahead(chain)

    def limit_reads(self, *, decoding: bool) -> None:
        """Read slowly from now on if rows decode, and fast if none does."""
        self._store.limit_reads(decoding=decoding)

    def give_up(self, reading: Reading, waited_s: float) -> None:
        """Record that a reading took too long: until the reader has ended it, no prefix is found."""
        self._store.give_up(reading, waited_s)

    def restore(self, loaded: LoadedSegment) -> tuple[KVSegment, StateSnapshot | None]:
        """Return the segment and the snapshot that were read of a file; they share the memory of what was read. Raises
        ValueError if they are not those of this network."""
        layout, arrays = json.loads(loaded.header.layout), loaded.arrays
        state = StateSnapshot(tuple(self._decoded(layout["state"], arrays))) if loaded.has_state else None
        return KVSegment(tuple(arrays[: layout["buffers"]])), state

    def _decoded(self, encoded: Sequence[dict[str, Any]], arrays: Sequence[mx.array]) -> Iterator[Any]:
        empty = (layer for layer in layers(make_prompt_cache(self._network)) if not is_sliceable(layer))
        for layer, each in zip(empty, encoded, strict=True):
            if type(layer).__name__ != each["kind"]:
                raise ValueError(f"state: a {each['kind']} is stored, the network has a {type(layer).__name__}.")
            layer.state = _decode(each["state"], arrays)
            yield layer

    def forget(self, namespace: str, tokens: tuple[int, ...]) -> list[Reading]:
        """Remove the files along these tokens. Cancels and returns the readings of them that requests hold, finished
        ones included."""
        ended = [reading for reading in self._readings if reading.chain.is_along(namespace, tokens)]
        for reading in ended:
            reading.cancel()
        self._store.forget(namespace, tokens)
        return ended

    def wait_for_room(self, nbytes: int, until_s: float) -> bool:
        """Wait until so many bytes can be handed over, at most until this time.monotonic()."""
        return self._store.wait_for_room(nbytes, until_s)

    def close(self, until_s: float) -> None:
        """Write what waits, at most until this time.monotonic(), and end the threads. Blocks."""
        self._store.close(max(0.0, until_s - time.monotonic()))

    @staticmethod
    def deadline_s() -> float:
        """Return the time.monotonic() at which a shutdown that begins now has to be done."""
        return time.monotonic() + _CLOSE_S


def _encoded(snapshot: StateSnapshot, arrays: list[mx.array]) -> Iterator[dict[str, Any]]:
    """Yield each layer as JSON, in which numbers of `arrays` stand for the arrays, which are appended."""
    for layer in snapshot.layers:
        yield {"kind": type(layer).__name__, "state": _encode(layer.state, arrays)}


def _encode(value: Any, arrays: list[mx.array]) -> Any:
    match value:
        case mx.array():
            arrays.append(value)
            return {"array": len(arrays) - 1}
        case list() | tuple():
            return [_encode(each, arrays) for each in value]
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"state: a {type(value).__name__} cannot be stored.")


def _decode(value: Any, arrays: Sequence[mx.array]) -> Any:
    match value:
        case {"array": index}:
            return arrays[index]
        case list():
            return [_decode(each, arrays) for each in value]
    return value


def _tensors(arrays: Sequence[mx.array], group_sizes: Sequence[int | None]) -> Iterator[Tensor]:
    """Yield the tensors of all arrays. `group_sizes`: of the first ones; all others are stored exactly."""
    for array, size in zip_longest(arrays, group_sizes):
        if size:
            yield from quantized_tensors(array, size)
        else:
            yield exact_tensor(array)


def store_of(options: StoreOptions, fingerprint: str, wake: Callable[[], None]) -> PrefixStore:
    """Return a store that reads into MLX arrays. `wake`: called on the reader's thread when a reading is done. Raises
    OSError and `NoCryptography`."""
    return PrefixStore(
        options,
        fingerprint,
        allocate=_allocate,
        decode=decode,
        num_kv_tensors=num_kv_tensors,
        on_read=wake,
        on_end=clear_streams,
    )


def _allocate(nbytes: int) -> Callable[[], mx.array]:
    """Start to make an array to write into, and return a function that waits for it. Called on the reader's thread.
    Without `mx.eval`, or for an array of another library's memory, Python's lock would be held while all of the memory
    is touched for the first time, which delays the engine's thread."""
    array = mx.zeros(nbytes, mx.uint8, stream=mx.cpu)
    mx.async_eval(array)

    def allocated() -> mx.array:
        mx.eval(array)
        return array

    return allocated
