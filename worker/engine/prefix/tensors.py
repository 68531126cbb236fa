"""Arrays as the tensors of a file, and back: exact, or as integers of 8 bits.

What is stored exactly is not copied: the writer's thread reads the arrays' memory itself, since they are evaluated and
never change. Quantizing is work of the writer's thread too, one array at a time and on the CPU, so that the engine's
thread computes nothing for a write, and nothing is computed for what is stored already. Dequantizing is work of the
reader's thread."""

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import cast

import mlx.core as mx

from worker.prefix_store.format import Deferred, Header, Tensor

BITS = 8
_GROUP_SIZES = 64, 32  # values that share a scale and a bias, of those that `mx.quantize` supports
_PARTS = 3  # tensors of a quantized array: packed values, scales, biases
_PACKED_BYTES = 4  # of an element of the packed values, which are uint32
_PIECE_VALUES = 1 << 18  # dequantized at a time: some megabytes of intermediate results, and a short pause after each

_DTYPES = {
    mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8",
    mx.uint16: "U16", mx.int16: "I16", mx.uint32: "U32", mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64",
}  # fmt: skip
_OF_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_FLOATS = mx.bfloat16, mx.float16, mx.float32


def exact_tensor(array: mx.array) -> Tensor:
    """Return an evaluated array as a tensor that shares its memory."""
    return Tensor(_DTYPES[array.dtype], array.shape, _bytes_of(array))


def _bytes_of(array: mx.array) -> memoryview | bytes:
    view = memoryview(cast("bytes", array))
    return view.cast("B") if view.c_contiguous and view.nbytes and view.ndim else view.tobytes()


def group_size(array: mx.array) -> int | None:
    """Return the number of values of the last axis that share a scale if the array is quantized; None if it can be
    stored exactly only."""
    if array.dtype not in _FLOATS or not array.size:
        return None
    return next((size for size in _GROUP_SIZES if array.shape[-1] % size == 0), None)


def stored_bytes(arrays: Iterable[mx.array], bits: int | None) -> int:
    """Return the bytes of the tensors of these arrays. `bits`: of a quantized value; None: all are stored exactly."""
    return sum(_quantized_bytes(array) if bits and group_size(array) else array.nbytes for array in arrays)


def _quantized_bytes(array: mx.array) -> int:
    size = group_size(array)
    assert size is not None, "the array is quantized"
    return array.size * BITS // 8 + 2 * (array.size // size) * array.dtype.size


def quantized_tensors(array: mx.array, size: int) -> Iterator[Tensor]:
    """Yield the tensors of a quantized array: packed values, scales, biases. They are computed when they are written.
    `size`: see `group_size`."""
    *axes, last = array.shape
    kinds = (mx.uint32, last * BITS // 8 // _PACKED_BYTES), (array.dtype, last // size), (array.dtype, last // size)
    quantization = _Quantization(array, size)
    for part, (dtype, length) in enumerate(kinds):
        nbytes = array.size // last * length * dtype.size
        yield Tensor(_DTYPES[dtype], (*axes, length), Deferred(nbytes, partial(quantization.take, part)))


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


def num_kv_tensors(header: Header) -> int:
    """Return the number of a file's first tensors that hold KV; the others hold the state."""
    layout = json.loads(header.layout)
    num_quantized = sum(size is not None for size in layout.get("group_sizes", ()))
    return int(layout["buffers"]) + (_PARTS - 1) * num_quantized


def decode(header: Header, buffers: Sequence[mx.array], on_done: Callable[[int], object]) -> list[mx.array]:
    """Return the arrays of a file's first tensors, evaluated: all, or its KV alone. Exact ones share the memory of the
    buffers; the others are dequantized in pieces, and `on_done` is called with the bytes of each, and may block. For
    the reader's thread: it computes on the CPU, so that the engine's thread has nothing to compute for a load, and its
    device stays free."""
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


def _dequantized(tensors: Iterator[mx.array], size: int, on_done: Callable[[int], object]) -> mx.array:
    """Return the array of the next tensors, in the type of its scales. Blocks."""
    parts = [next(tensors) for _ in range(_PARTS)]
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
