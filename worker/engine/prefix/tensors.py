"""Segments and snapshots as the tensors of a file, and back: exact, or as integers of 8 bits.

What is stored exactly is not copied: the writer's thread reads the arrays' memory itself, since they are evaluated and
never change. Quantizing is work of the writer's thread too, one array at a time and on the CPU, so that the engine's
thread computes nothing for a write, and nothing is computed for what is stored already. In the other direction the
reader's thread fills arrays that it allocates, and dequantizes. MLX allows both for arrays that are evaluated (a test
holds it)."""

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import mlx.core as mx

from worker.engine.cache.segments import KVSegment, StateSnapshot
from worker.engine.upstream.streams import clear_streams
from worker.prefix_store.format import Header, OnRead, StoredSegment, Tensor
from worker.prefix_store.reader import Destination, LoadedSegment

BITS = 8
_GROUP_SIZES = 64, 32  # values that share a scale and a bias, of those that `mx.quantize` supports
_PIECE_VALUES = 1 << 18  # dequantized at a time: some megabytes of intermediate results, and a short pause after each

_DTYPES = {
    mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8",
    mx.uint16: "U16", mx.int16: "I16", mx.uint32: "U32", mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64",
}  # fmt: skip
_OF_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_FLOATS = mx.bfloat16, mx.float16, mx.float32


def exact_tensor(array: mx.array) -> Tensor:
    """Return an evaluated array as a tensor that shares its memory."""
    return Tensor.of(_DTYPES[array.dtype], array.shape, _bytes_of(array))


def _bytes_of(array: mx.array) -> memoryview | bytes:
    view = memoryview(cast("bytes", array))
    return view.cast("B") if view.c_contiguous and view.nbytes and view.ndim else view.tobytes()


def group_size(array: mx.array) -> int | None:
    """Return the number of values of the last axis that share a scale if the array is quantized; None if it can be
    stored exactly only."""
    if array.dtype not in _FLOATS or not array.size:
        return None
    return next((size for size in _GROUP_SIZES if array.shape[-1] % size == 0), None)


def quantized_tensors(array: mx.array, size: int) -> Iterator[Tensor]:
    """Yield the tensors of a quantized array: packed values, scales, biases. They are computed when they are written.
    `size`: see `group_size`."""
    *axes, last = array.shape
    kinds = (mx.uint32, last * BITS // 8 // mx.uint32.size), (array.dtype, last // size), (array.dtype, last // size)
    quantization = _Quantization(array, size)
    for part, (dtype, length) in enumerate(kinds):
        nbytes = array.size // last * length * dtype.size
        yield Tensor(_DTYPES[dtype], (*axes, length), nbytes, partial(quantization.take, part))


class _Quantization:
    """Quantizes an array when the first of its tensors is written, and holds each one until it is. For the writer's
    thread."""

    def __init__(self, array: mx.array, size: int) -> None:
        self._array = array
        self._size = size
        self._parts: dict[int, mx.array] = {}

    def take(self, part: int) -> memoryview | bytes:
        """Return the bytes of one of the tensors. Raises OSError if memory does not suffice."""
        if part not in self._parts:
            self._parts = dict(enumerate(self._computed()))
        return _bytes_of(self._parts.pop(part))

    def _computed(self) -> Sequence[mx.array]:
        try:
            parts = mx.quantize(self._array, group_size=self._size, bits=BITS, stream=mx.cpu)
            mx.eval(parts)
        except (MemoryError, RuntimeError, ValueError) as error:  # without memory MLX raises any of these
            raise OSError(errno.ENOMEM, f"{self._array.nbytes} bytes cannot be quantized: {error}") from error
        return parts


class Arrays(Destination):
    """Files are read into MLX arrays."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake`: called on the reader's thread when a reading is done."""
        self._wake = wake

    def allocate(self, nbytes: int) -> Callable[[], mx.array]:
        """Start to make an array to write into, and return a function that waits for it. Without `mx.eval`, or for an
        array of another library's memory, Python's lock would be held while all of the memory is touched for the first
        time, which delays the engine's thread."""
        array = mx.zeros(nbytes, mx.uint8, stream=mx.cpu)
        mx.async_eval(array)

        def allocated() -> mx.array:
            mx.eval(array)
            return array

        return allocated

    def num_kv_tensors(self, header: Header) -> int:
        """Return the number of a file's first tensors that hold KV; the others hold the state."""
        layout = json.loads(header.layout)
        num_quantized = sum(size is not None for size in layout.get("group_sizes", ()))
        return int(layout["buffers"]) + 2 * num_quantized  # which have scales and biases too

    def decode(self, header: Header, buffers: list[mx.array], on_done: OnRead) -> list[mx.array]:
        """Return the arrays of a file's first tensors, evaluated: all, or its KV alone. Exact ones share the memory of
        the buffers; the others are dequantized in pieces. It computes on the CPU, so that the engine's thread has
        nothing to compute for a load, and its device stays free."""
        views = [
            mx.reshape(mx.view(buffer, _OF_NAME[dtype], stream=mx.cpu), shape, stream=mx.cpu)
            for buffer, dtype, shape in zip(buffers, header.dtypes, header.shapes, strict=False)
        ]
        tensors = iter(views)
        group_sizes = json.loads(header.layout).get("group_sizes", ())
        arrays = [_dequantized(tensors, size, on_done) if size else next(tensors) for size in group_sizes]
        arrays += tensors
        mx.eval(arrays)
        return arrays

    def on_read(self) -> None:
        """Let the engine go on with what was read."""
        self._wake()

    def on_end(self) -> None:
        """End the thread's use of MLX."""
        clear_streams()


def _dequantized(tensors: Iterator[mx.array], size: int, on_done: OnRead) -> mx.array:
    """Return the array of the next tensors, in the type of its scales. Blocks."""
    parts = [next(tensors) for _ in ("packed values", "scales", "biases")]
    *axes, groups = parts[-1].shape
    rows = parts[-1].size // groups
    cuts = [*range(_PIECE_VALUES // (groups * size) + 1, rows, _PIECE_VALUES // (groups * size) + 1)]
    flat = [mx.reshape(part, (rows, -1), stream=mx.cpu) for part in parts]
    pieces = list[mx.array]()
    for packed, scales, biases in zip(*(mx.split(each, cuts, stream=mx.cpu) for each in flat), strict=True):
        values = mx.dequantize(packed, scales, biases, group_size=size, bits=BITS, stream=mx.cpu)
        mx.eval(values)
        pieces.append(values)
        on_done(values.nbytes)
    array = mx.reshape(mx.concatenate(pieces, stream=mx.cpu), (*axes, groups * size), stream=mx.cpu)
    mx.eval(array)
    return array


def stored_segment(
    namespace: str,
    tokens: tuple[int, ...],
    segment: KVSegment,
    state: StateSnapshot | None,
    *,
    kinds: str,
    bits: int | None,
) -> StoredSegment:
    """Return the content of a file with these tokens, and the state after them. Copies nothing. `kinds`: of the layers
    of the network. `bits`: of a value of the KV, 8; None: it is stored exactly."""
    arrays = [*segment.buffers]
    layout: dict[str, Any] = {"kinds": kinds, "buffers": len(arrays)}
    layout["state"] = None if state is None else [*_encoded(state, arrays)]
    group_sizes = [group_size(buffer) for buffer in segment.buffers] if bits else []
    if bits:
        layout |= {"bits": bits, "group_sizes": group_sizes}
    return StoredSegment(namespace, tokens, json.dumps(layout), tuple(_tensors(arrays, group_sizes)))


def restored_segment(loaded: LoadedSegment, empty: Iterable[Any]) -> tuple[KVSegment, StateSnapshot | None]:
    """Return the segment and the snapshot that were read of a file; they share the memory of what was read. `empty`:
    new caches of the network's layers that have a state. Raises ValueError if they are not those of this network."""
    layout, arrays = json.loads(loaded.header.layout), loaded.arrays
    state = StateSnapshot(tuple(_decoded(layout["state"], arrays, empty))) if loaded.has_state else None
    return KVSegment(tuple(arrays[: layout["buffers"]])), state


def _decoded(encoded: Sequence[dict[str, Any]], arrays: Sequence[mx.array], empty: Iterable[Any]) -> Iterator[Any]:
    for layer, each in zip(empty, encoded, strict=True):
        if type(layer).__name__ != each["kind"]:
            raise ValueError(f"state: a {each['kind']} is stored, the network has a {type(layer).__name__}.")
        layer.state = _decode(each["state"], arrays)
        yield layer


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
