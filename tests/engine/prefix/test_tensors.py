"""KV that is stored with 8 bits: its size, its error, and what stays exact."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.prefix.test_disk import ANSWER, DOCUMENT, Worker, ends_on_disk, settled
from tests.engine.tiny import FAMILIES, alone, build, model_of, prompt
from worker.engine.cache.segments import KVSegment, StateSnapshot
from worker.engine.model.load import Model
from worker.engine.prefix.tensors import Arrays, exact_tensor, group_size, quantized_tensors
from worker.prefix_store.format import Header, Tensor
from worker.prefix_store.names import FileName
from worker.prefix_store.writer import Writer

WIDE = {"llama": {"head_dim": 64}, "qwen3_5": {"head_dim": 32}, "deepseek_v3": {"kv_lora_rank": 32}}
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def always_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes a prefix faster than a disk reads it."""
    monkeypatch.setattr("worker.engine.prefill.queue.load_limit_s", lambda *_, **__: 60.0)


# Arrays


def header_of(tensors: list[Tensor], group_sizes: list[int | None]) -> Header:
    return Header(
        name=FileName("0", "0", "0", 0, 1, False),
        namespace="",
        tokens=(1,),
        layout=json.dumps({"group_sizes": group_sizes}),
        created_s=0.0,
        dtypes=tuple(tensor.dtype for tensor in tensors),
        shapes=tuple(tensor.shape for tensor in tensors),
        checksums=(),
        data_start=0,
        ends=(),
    )


def read_back(
    tensors: list[Tensor], group_sizes: list[int | None], on_done: Callable[[int], object] = lambda nbytes: None
) -> list[mx.array]:
    buffers = [mx.array(memoryview(bytes(tensor.content()))) for tensor in tensors]
    return Arrays(lambda: None).decode(header_of(tensors, group_sizes), buffers, on_done)


def steps(array: mx.array, size: int) -> mx.array:
    """Return the quantization step at each value: the range of its group in 255 parts."""
    groups = array.astype(mx.float32).reshape(*array.shape[:-1], -1, size)
    step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / 255
    return mx.broadcast_to(step, groups.shape).reshape(array.shape)


@pytest.mark.parametrize("size", [64, 32])
# Scales of 16 bits add their own rounding to that of the values.
@pytest.mark.parametrize(("dtype", "most"), [(mx.float32, 1.001), (mx.float16, 1.2), (mx.bfloat16, 3.0)])
def test_a_quantized_array_is_right_to_a_step(dtype: mx.Dtype, most: float, size: int) -> None:
    mx.random.seed(0)
    array = mx.random.normal((1, 3, 50, 3 * size)).astype(dtype)
    mx.eval(array)
    assert group_size(array) == size
    tensors = [*quantized_tensors(array, size)]
    assert [len(tensor.content()) for tensor in tensors] == [tensor.nbytes for tensor in tensors]
    (found,) = read_back(tensors, [size])
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    error = mx.abs(found.astype(mx.float32) - array.astype(mx.float32))
    assert bool((error <= most * steps(array, size)).all())
    assert bool((error > 0).any())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 2, 5, 16), mx.float32), ((1, 1, 5, 0), mx.float32), ((1, 2, 5, 64), mx.int32), ((0, 64), mx.bfloat16)],
)
def test_an_array_that_cannot_be_quantized_is_stored_exactly(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    array = mx.zeros(shape, dtype)
    assert group_size(array) is None


@pytest.mark.parametrize("values", [1, 64, 1000, 10**9])
def test_an_array_is_dequantized_in_pieces(monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    monkeypatch.setattr("worker.engine.prefix.tensors._PIECE_VALUES", values)
    array, done = mx.random.normal((1, 3, 7, 64)), list[int]()
    mx.eval(array)
    whole = mx.dequantize(*mx.quantize(array, 64, 8, stream=mx.cpu), group_size=64, bits=8, stream=mx.cpu)
    (found,) = read_back([*quantized_tensors(array, 64)], [64], done.append)
    assert mx.array_equal(found, whole).item()
    assert sum(done) == array.nbytes
    assert max(done) <= max(values, 64) * 4 + 64 * 4


def test_exact_arrays_follow_quantized_ones_in_order() -> None:
    arrays = [mx.random.normal((1, 2, 4, 64)), mx.arange(6), mx.ones((2, 3), mx.bfloat16)]
    mx.eval(arrays)
    tensors = [exact_tensor(arrays[1]), *quantized_tensors(arrays[0], 64), exact_tensor(arrays[2])]
    found = read_back(tensors, [None, 64])
    assert found[0].tolist() == arrays[1].tolist()
    assert found[1].shape == arrays[0].shape
    assert found[2].tolist() == arrays[2].tolist()


# Prefixes


def wide(family: str, dtype: mx.Dtype = mx.float32) -> Model:
    """Return a model whose keys and values can be quantized."""
    config = {**FAMILIES[family]}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **WIDE[family]}
    else:
        config |= WIDE[family]
    network = build(config)
    network.set_dtype(dtype)
    return model_of(network, config)


def answered(run: Worker) -> int:
    """Let a worker answer the document to its end; return the number of cached tokens."""
    run.add("row", DOCUMENT, max_tokens=ANSWER, boundaries=(40,))
    while len(run.engine):
        run.step()
    assert run.generated["row"]
    return run.cached["row"]


def held(run: Worker) -> dict[int, tuple[KVSegment | None, StateSnapshot | None]]:
    """Return what memory holds along the document, by the end of each node."""
    prefix = run.engine._caches.prefix
    assert prefix is not None
    path, _ = prefix._tree.walk("", DOCUMENT)
    return {node.end: (node.segment, node.snapshot) for node in path if node.end <= len(DOCUMENT)}


def states(snapshot: StateSnapshot | None) -> list[Any]:
    return [list(flat(layer.state)) for layer in snapshot.layers] if snapshot else []


def flat(state: Any) -> Iterator[Any]:
    if isinstance(state, mx.array):
        yield state.dtype, state.shape, bytes(memoryview(mx.contiguous(state).view(mx.uint8)))  # type: ignore[arg-type]
    elif isinstance(state, list | tuple):
        for each in state:
            yield from flat(each)
    else:
        yield state


def bytes_in(folder: Path) -> int:
    """Return the bytes of the tensors in all files."""
    found = 0
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        found += len(content) - 8 - length
    return found


@pytest.mark.parametrize("family", [*WIDE])
def test_kv_of_8_bits_is_restored_to_a_step_and_states_exactly(tmp_path: Path, family: str) -> None:
    opened = wide(family)
    first = Worker(family, tmp_path, opened=opened, bits=8)
    assert answered(first) == 0
    written = held(first)
    first.close()
    again = Worker(family, tmp_path, opened=opened, bits=8)
    assert answered(again) >= len(DOCUMENT) - 1
    found = held(again)
    again.close()
    assert written.keys() <= found.keys()
    assert any(group_size(buffer) for segment, _ in written.values() for buffer in (segment.buffers if segment else ()))
    for end, (segment, snapshot) in written.items():
        loaded, state = found[end]
        assert states(state) == (states(snapshot) if end == max(written) else [])  # only the last state is read
        assert segment is not None
        assert loaded is not None
        for before, after in zip(segment.buffers, loaded.buffers, strict=True):
            size = group_size(before)
            assert (after.dtype, after.shape) == (before.dtype, before.shape)
            allowed = 1.001 * steps(before, size) if size else mx.zeros_like(before)
            assert bool((mx.abs(after - before) <= allowed).all())


@pytest.mark.parametrize(("dtype", "share"), [(mx.float32, 1 / 4), (mx.bfloat16, 1 / 2)])
def test_files_of_8_bits_are_a_quarter_of_fp32_and_half_of_bf16(tmp_path: Path, dtype: mx.Dtype, share: float) -> None:
    opened = wide("llama", dtype)
    for name, bits in (("exact", None), ("small", 8)):
        run = Worker("llama", tmp_path / name, opened=opened, bits=bits)
        answered(run)
        run.close()
    assert share < bytes_in(tmp_path / "small") / bytes_in(tmp_path / "exact") < 1.15 * share


@pytest.mark.parametrize("bits", [None, 8])
def test_prefixes_stored_otherwise_are_not_found(tmp_path: Path, bits: int | None) -> None:
    opened = wide("llama")
    run = Worker("llama", tmp_path, opened=opened, bits=bits)
    answered(run)
    run.close()
    other = Worker("llama", tmp_path, opened=opened, bits=None if bits else 8)
    assert answered(other) == 0
    other.close()
    again = Worker("llama", tmp_path, opened=opened, bits=bits)
    assert answered(again) > 0
    again.close()


def test_encrypted_kv_of_8_bits_is_loaded(tmp_path: Path) -> None:
    opened = wide("qwen3_5")
    run = Worker("qwen3_5", tmp_path, opened=opened, bits=8, key=KEY)
    answered(run)
    run.close()
    again = Worker("qwen3_5", tmp_path, opened=opened, bits=8, key=KEY)
    assert answered(again) >= len(DOCUMENT) - 1
    again.close()


def test_the_engines_thread_computes_nothing_for_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, threads = wide("llama"), set[str]()
    run = Worker("llama", tmp_path, opened=opened, bits=8)
    answered(run)
    run.close()
    dequantize = mx.dequantize

    def recorded(*given: Any, **options: Any) -> mx.array:
        threads.add(threading.current_thread().name)
        return dequantize(*given, **options)

    monkeypatch.setattr(mx, "dequantize", recorded)
    again = Worker("llama", tmp_path, opened=opened, bits=8)
    assert answered(again) > 0
    again.close()
    assert threads == {"prefix-reader"}


def test_the_layout_of_a_file_says_how_it_is_stored(tmp_path: Path) -> None:
    for bits in (None, 8):
        run = Worker("llama", tmp_path / str(bits), opened=wide("llama"), bits=bits)
        answered(run)
        run.close()
    layouts = {bits: layout_in(tmp_path / str(bits)) for bits in (None, 8)}
    assert layouts[None].keys() == {"buffers", "state", "kinds"}
    assert (layouts[8]["bits"], layouts[8]["group_sizes"]) == (8, [64] * layouts[8]["buffers"])


def layout_in(folder: Path) -> dict[str, Any]:
    content = next(folder.glob("*.safetensors")).read_bytes()
    length = int.from_bytes(content[:8], "little")
    layout: dict[str, Any] = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["layout"])
    return layout


def test_what_waits_counts_with_its_memory_and_not_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    write = Writer._write

    def hang(*arguments: Any) -> Any:
        assert go.wait(20)
        return write(*arguments)

    monkeypatch.setattr(Writer, "_write", hang)
    run = Worker("llama", tmp_path, opened=wide("llama"), bits=8)
    answered(run)
    prefix = run.engine._caches.prefix
    assert prefix is not None
    before = prefix.nbytes
    prefix.set_limit(0)
    assert prefix.nbytes == before > 0
    go.set()
    settled(run)
    run.close()


def test_a_load_reserves_the_memory_of_its_dequantized_kv(tmp_path: Path) -> None:
    opened = wide("llama")
    run = Worker("llama", tmp_path, opened=opened, bits=8)
    answered(run)
    run.close()
    again = Worker("llama", tmp_path, opened=opened, bits=8)
    prefix = again.engine._caches.prefix
    assert prefix is not None
    disk = prefix.disk
    assert disk is not None
    chain = disk.find("", DOCUMENT, 0)
    assert chain is not None
    kv_bytes = len(chain.tokens) * opened.costs.token_bytes
    memory_bytes = disk.memory_bytes(chain)
    assert memory_bytes == kv_bytes + max(chain.sizes)
    assert disk.size_of(chain, 0).file_bytes == chain.sizes
    prefix._max_bytes = prefix._limit = memory_bytes - 1
    assert prefix.read("", DOCUMENT, lambda load: 60.0) is None
    assert prefix.read_for_row("", DOCUMENT, lambda load: 60.0, memory_bytes - 1) is None
    prefix._max_bytes = prefix._limit = memory_bytes
    assert prefix.read("", DOCUMENT, lambda load: 60.0) is not None
    again.close()


def test_without_memory_nothing_is_written_and_the_worker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 8 bytes.")

    monkeypatch.setattr("worker.engine.prefix.tensors.mx.quantize", failing)
    run = Worker("llama", tmp_path, opened=wide("llama"), bits=8)
    answered(run)
    run.engine._caches.set_limit(0)
    settled(run)
    run.close()
    assert not [*tmp_path.glob("*.safetensors")]
    assert "cannot be quantized" in caplog.text
    monkeypatch.undo()


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_row_whose_answer_has_begun_does_not_continue_from_kv_of_8_bits(tmp_path: Path, family: str) -> None:
    """Neither after a preemption nor on another worker, although its prompt is on disk."""
    opened, tokens = wide(family), prompt(300, 4)
    run = Worker(family, tmp_path, opened=opened, bits=8)
    run.add("row", tokens, max_tokens=ANSWER, lane="batch")
    run.until(lambda: len(run.generated["row"]) >= 2)
    run.preempt("row")
    said = [*run.generated["row"]]
    run.spill()
    run.engine._caches.set_limit(0)
    settled(run)
    assert 0 < max(ends_on_disk(run, tmp_path)) < len(tokens), "its prompt is on disk, and no answer"
    run.engine._caches.set_limit(10**9)
    run.readmit()
    other = Worker(family, tmp_path, opened=opened, bits=8)
    other.add("row", tokens, max_tokens=ANSWER, resume_tokens=said)
    for each in run, other:
        while len(each.engine):
            each.step()
        assert each.cached["row"] == 0
        assert each.generated["row"] == alone(opened.network, tokens, ANSWER)
        each.close()
