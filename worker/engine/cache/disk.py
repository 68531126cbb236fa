"""The disk tier of the prefix cache: segments and snapshots as bytes, and back.

The writer's thread reads the arrays' memory itself, so that handing them over copies nothing: they are evaluated
and never change. In the other direction the reader's thread fills arrays that it allocates. MLX allows both for arrays
that are evaluated (a test holds it)."""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache.layers import layers
from worker.engine.cache.segments import KVSegment, StateSnapshot, is_sliceable
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.engine.upstream.streams import clear_streams
from worker.errors import CannotStart
from worker.prefix_store.encryption import NoCryptography
from worker.prefix_store.format import StoredSegment, Tensor
from worker.prefix_store.index import Chain
from worker.prefix_store.reader import LoadedSegment, Reading
from worker.prefix_store.store import PrefixStore, StoreOptions
from worker.prefix_store.writer import NewSegment, WriteReport

_DTYPES = {
    mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8",
    mx.uint16: "U16", mx.int16: "I16", mx.uint32: "U32", mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64",
}  # fmt: skip
_OF_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_CLOSE_S = 20.0  # for what is written at shutdown


class DiskTier:
    """Segments of one network on disk. For the engine's thread."""

    def __init__(self, network: nn.Module, fingerprint: str, options: StoreOptions, wake: Callable[[], None]) -> None:
        """`fingerprint`: of the model. `wake`: called on another thread when a reading is done. Blocks until the folder
        is listed. Raises `CannotStart`."""
        self._network = network
        self._states = [layer for layer in layers(make_prompt_cache(network)) if not is_sliceable(layer)]
        libraries = f"mlx-lm {version('mlx-lm')}"  # another release may compute other states
        kinds = " ".join(type(layer).__name__ for layer in layers(make_prompt_cache(network)))
        try:
            self._store = store_of(options, f"{fingerprint} {libraries} {kinds}", wake)
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
        """Measured speed of reading."""
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
        layout = {"buffers": len(arrays), "state": None if state is None else [*_encoded(state, arrays)]}
        tensors = tuple(Tensor(_DTYPES[array.dtype], array.shape, _bytes_of(array)) for array in arrays)
        content = StoredSegment(namespace, path[len(path) - tokens :], json.dumps(layout), tensors)
        return self._store.write(NewSegment(path, state is not None, content, pinned=report is not None, report=report))

    def find(self, namespace: str, tokens: tuple[int, ...], *, held: Collection[int], longer_than: int) -> Chain | None:
        """Return the files of the longest stored prefix; see `Index.find`."""
        stateful = bool(self._states)
        return self._store.find(namespace, tokens, stateful=stateful, held=held, longer_than=longer_than)

    def read(self, chain: Chain) -> Reading:
        """Start to read files, or return the reading of the same files that is under way."""
        return self._store.read(chain)

    def limit_reads(self, *, decoding: bool) -> None:
        """Read slowly from now on if rows decode, and fast if none does."""
        self._store.limit_reads(decoding=decoding)

    def give_up(self, reading: Reading, waited_s: float) -> None:
        """Record that a reading took too long: until the reader has ended it, no prefix is found."""
        self._store.give_up(reading, waited_s)

    def restore(self, loaded: LoadedSegment) -> tuple[KVSegment, StateSnapshot | None]:
        """Return the segment and the snapshot that a file holds; they share the memory of its buffers. Raises
        ValueError if they are not those of this network."""
        header = loaded.header
        views = zip(loaded.buffers, header.dtypes, header.shapes, strict=True)
        arrays = [buffer.view(_OF_NAME[dtype]).reshape(shape) for buffer, dtype, shape in views]
        mx.eval(arrays)
        layout = json.loads(header.layout)
        state = None if layout["state"] is None else StateSnapshot(tuple(self._decoded(layout["state"], arrays)))
        return KVSegment(tuple(arrays[: layout["buffers"]])), state

    def _decoded(self, encoded: Sequence[dict[str, Any]], arrays: Sequence[mx.array]) -> Iterator[Any]:
        empty = (layer for layer in layers(make_prompt_cache(self._network)) if not is_sliceable(layer))
        for layer, each in zip(empty, encoded, strict=True):
            if type(layer).__name__ != each["kind"]:
                raise ValueError(f"state: a {each['kind']} is stored, the network has a {type(layer).__name__}.")
            layer.state = _decode(each["state"], arrays)
            yield layer

    def forget(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Remove the files along these tokens."""
        self._store.forget(namespace, tokens)

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


def _bytes_of(array: mx.array) -> memoryview | bytes:
    view = memoryview(cast(Any, array))
    return view.cast("B") if view.c_contiguous and view.nbytes and view.ndim else view.tobytes()


def store_of(options: StoreOptions, fingerprint: str, wake: Callable[[], None]) -> PrefixStore:
    """Return a store that reads into MLX arrays. `wake`: called on the reader's thread when a reading is done. Raises
    OSError and `NoCryptography`."""
    return PrefixStore(options, fingerprint, allocate=_allocate, on_read=wake, on_end=clear_streams)


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
