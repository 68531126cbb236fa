"""Prefixes that were evicted, or whose worker was restarted, are loaded from disk, and change no token."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.driver import Run
from tests.engine.prefix.test_cache import ALL, SOME, SYSTEM, lonely
from tests.engine.tiny import model, network, prompt
from worker.engine.cache.layers import layers
from worker.engine.model.load import Model
from worker.engine.options import EngineOptions
from worker.engine.prefill import task as prefill_module
from worker.engine.prefix import tree as tree_module
from worker.engine.prefix.disk import DiskPrefixes, Storing
from worker.engine.prefix.tensors import Arrays
from worker.engine.thread import EngineThread
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.engine.upstream.streams import clear_streams
from worker.outcomes import NotStored, Outcome, PromptProgress, Sampled, StoreResult
from worker.prefix_store.format import read_file_header
from worker.prefix_store.listing import Listing
from worker.prefix_store.names import parse_name
from worker.prefix_store.reader import Reader
from worker.prefix_store.store import PrefixStore, StoreOptions
from worker.prefix_store.writer import Writer
from worker.request import GenerationRequest

ANSWER = 6
DOCUMENT = prompt(300, 9)


@pytest.fixture(autouse=True)
def always_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes a prefix faster than a disk reads it."""
    monkeypatch.setattr("worker.engine.prefill.queue.load_limit_s", lambda *_, **__: 60.0)


class Worker(Run):
    """An engine with a folder for its prefixes."""

    def __init__(
        self,
        family: str,
        folder: Path,
        *,
        prefix_bytes: int = 10**9,
        max_bytes: int = 10**9,
        opened: Model | None = None,
        step_s: float = 0.02,
        memory: int | None = None,
        max_pending_bytes: int = 10**9,
        bits: int | None = None,
        key: bytes | None = None,
    ) -> None:
        """`opened`: another model than the family's."""
        self.woken = threading.Event()
        options = StoreOptions(folder, max_bytes, max_pending_bytes=max_pending_bytes, key=key)
        super().__init__(
            opened or model(family),
            step_s=step_s,
            memory=memory,
            prefix_bytes=prefix_bytes,
            open_disk=lambda opened: DiskPrefixes(
                opened.network,
                opened.cache_fingerprint,
                options,
                self.woken.set,
                bits=bits,
                token_bytes=opened.costs.token_bytes,
            ),
        )

    def say(self, family: str, tokens: tuple[int, ...], *boundaries: int, namespace: str = "") -> int:
        """Answer to the end, and right; return the number of cached tokens."""
        id = f"row {len(self.generated)}"
        self.add(id, tokens, max_tokens=ANSWER, boundaries=boundaries, namespace=namespace)
        while len(self.engine):
            self.step()
        assert tuple(self.generated[id]) == lonely(family, tokens, ANSWER)
        return self.cached[id]

    def close(self) -> None:
        self.engine.close()


def turn_of(family: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return the prompt of the next turn."""
    return (*tokens, *lonely(family, tokens, ANSWER), *prompt(10, 77))


@ALL
def test_a_restarted_worker_goes_on_at_the_last_boundary(tmp_path: Path, family: str) -> None:
    first = Worker(family, tmp_path)
    first.say(family, DOCUMENT, 40)
    from_memory = first.say(family, turn_of(family, DOCUMENT), 40)
    first.close()
    again = Worker(family, tmp_path)
    assert again.say(family, turn_of(family, DOCUMENT), 40) >= from_memory >= len(DOCUMENT) - 1
    again.close()


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "falcon_h1", "mamba2"])
def test_a_snapshot_where_prompts_part_is_found_after_a_restart(tmp_path: Path, family: str) -> None:
    common = SYSTEM + prompt(50, 78)
    first = Worker(family, tmp_path)
    found = [first.say(family, common + prompt(20, 100 + number)) for number in range(2)]
    first.close()
    again = Worker(family, tmp_path)
    found += [again.say(family, common + prompt(20, 102 + number)) for number in range(2)]
    again.close()
    assert found == [0, 0, len(common), len(common)]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "falcon_h1", "mamba2"])
def test_a_prompt_that_parts_from_one_on_disk_takes_a_snapshot_at_the_end_of_a_file(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in prefill_module, tree_module:
        monkeypatch.setattr(module, "MAX_SEGMENT_TOKENS", 32)
    common = SYSTEM + prompt(50, 79)
    stored(family, tmp_path, common + prompt(20, 100))
    again = Worker(family, tmp_path)
    found = [again.say(family, common + prompt(20, 101 + number)) for number in range(3)]
    again.close()
    assert found == [len(SYSTEM), len(SYSTEM) + 32, len(common)]


@ALL
def test_what_is_loaded_is_byte_equal_to_what_was_stored(tmp_path: Path, family: str) -> None:
    first = Worker(family, tmp_path)
    first.say(family, DOCUMENT, 40)
    stored = cached(first, DOCUMENT)
    first.close()
    again = Worker(family, tmp_path)
    again.say(family, DOCUMENT, 40)
    for end in stored:  # of the states along a prefix, only the last one is read with it
        assert again.say(family, (*DOCUMENT[:end], *prompt(10, 5))) >= end
    found = cached(again, DOCUMENT)
    again.close()
    assert stored.keys() <= found.keys()
    assert all(found[end] == content for end, content in stored.items())


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_a_prompt_that_ends_its_match_at_a_state_on_disk_reads_one_file(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(family, tmp_path, DOCUMENT)
    again = Worker(family, tmp_path)
    assert again.say(family, DOCUMENT) >= len(DOCUMENT) - 1
    read = list[str]()
    read_segment = Reader._read_segment
    monkeypatch.setattr(Reader, "_read_segment", lambda *given: read.append(str(given[1])) or read_segment(*given))
    assert again.say(family, (*DOCUMENT[:40], *prompt(10, 5))) == 40
    assert again.say(family, (*DOCUMENT[:40], *prompt(10, 6))) == 40  # from memory
    assert len(read) == 1
    again.close()


def cached(run: Worker, tokens: tuple[int, ...]) -> dict[int, list[Any]]:
    """Return all bytes that the prefix cache holds along these tokens, by the end of each node."""
    prefix = run.engine._caches.prefix
    assert prefix is not None
    path, _ = prefix._tree.walk("", tokens)
    return {node.end: content(node.segment) + content(node.snapshot) for node in path if node.end <= len(tokens)}


def content(held: Any) -> list[Any]:
    if held is None:
        return []
    if hasattr(held, "buffers"):
        return [raw(each) for each in held.buffers]
    return [raw(layer.state) for layer in held.layers]


def raw(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value.dtype, value.shape, memoryview(value).tobytes()  # type: ignore[arg-type]
    return [raw(each) for each in value] if isinstance(value, list | tuple) else value


@SOME
def test_the_header_names_the_kinds_of_all_layers(tmp_path: Path, family: str) -> None:
    stored(family, tmp_path, DOCUMENT)
    kinds = {type(layer).__name__ for layer in layers(make_prompt_cache(network(family)))}
    for file in tmp_path.glob("*.safetensors"):
        name = parse_name(file.name)
        assert name is not None
        assert {*json.loads(read_file_header(file, name).layout)["kinds"].split()} == kinds


@SOME
def test_an_evicted_prefix_is_loaded_again(tmp_path: Path, family: str) -> None:
    run = Worker(family, tmp_path)
    run.say(family, DOCUMENT, 40)
    run.engine._caches.set_limit(0)
    settled(run)
    run.engine._caches.set_limit(10**9)
    assert run.say(family, DOCUMENT, 40) >= len(DOCUMENT) - 1
    run.close()


def settled(run: Worker) -> None:
    """Wait until everything is written."""
    prefix = run.engine._caches.prefix
    assert prefix is not None
    until = time.monotonic() + 20
    while prefix.nbytes:
        assert time.monotonic() < until
        time.sleep(0.002)


@SOME
def test_a_prefix_that_was_used_twice_is_on_disk_before_it_is_evicted(tmp_path: Path, family: str) -> None:
    run = Worker(family, tmp_path)
    for number in range(3):
        run.say(family, SYSTEM + prompt(20, 100 + number), len(SYSTEM))
    other = Worker(family, tmp_path)  # the first is killed without a chance to write
    until = time.monotonic() + 20
    while not list(tmp_path.glob("*.safetensors")):
        assert time.monotonic() < until
        time.sleep(0.002)
    time.sleep(0.05)
    other.close()
    third = Worker(family, tmp_path)
    assert third.say(family, SYSTEM + prompt(20, 200), len(SYSTEM)) == len(SYSTEM)
    third.close()
    run.close()


def ends_on_disk(run: Worker, folder: Path) -> set[int]:
    """Return the ends of all files, once nothing waits to be written."""
    settled_writes(run)
    names = [parse_name(file.name) for file in folder.glob("*.safetensors")]
    return {name.end for name in names if name}


@SOME
def test_a_shared_part_is_written_early_if_one_conversation_had_used_it_before(tmp_path: Path, family: str) -> None:
    """Its third request is the first of another conversation, and gives it a node of its own."""
    run = Worker(family, tmp_path)
    first = SYSTEM + prompt(20, 100)
    run.say(family, first)
    run.say(family, turn_of(family, first))
    assert not ends_on_disk(run, tmp_path)
    run.say(family, SYSTEM + prompt(20, 101), len(SYSTEM))
    assert ends_on_disk(run, tmp_path) == {len(SYSTEM)}
    run.close()


@SOME
def test_tails_that_one_request_uses_are_not_written_early(tmp_path: Path, family: str) -> None:
    run = Worker(family, tmp_path)
    for number in range(6):
        run.say(family, SYSTEM + prompt(20, 100 + number), len(SYSTEM))
    assert ends_on_disk(run, tmp_path) == {len(SYSTEM)}
    run.close()


@SOME
def test_what_could_not_wait_to_be_written_early_is_written_after_its_next_use(
    tmp_path: Path, family: str, full: threading.Event
) -> None:
    run = Worker(family, tmp_path, max_pending_bytes=1)
    run.say(family, DOCUMENT)
    attempt = run.engine.store_prefix("", DOCUMENT[:-1])
    assert isinstance(attempt, Storing)  # its first file waits, so no other may
    for number in range(3):
        run.say(family, SYSTEM + prompt(20, 100 + number), len(SYSTEM))
    full.set()
    assert len(SYSTEM) not in ends_on_disk(run, tmp_path)
    run.say(family, SYSTEM + prompt(20, 103), len(SYSTEM))
    assert len(SYSTEM) in ends_on_disk(run, tmp_path)
    run.close()


@SOME
def test_a_tenant_does_not_load_the_prefix_of_another(tmp_path: Path, family: str) -> None:
    first = Worker(family, tmp_path)
    first.say(family, DOCUMENT, 40, namespace="a")
    first.close()
    again = Worker(family, tmp_path)
    assert again.say(family, DOCUMENT, 40, namespace="b") == 0
    assert again.say(family, DOCUMENT, 40, namespace="a") > 0
    again.close()


@SOME
def test_a_damaged_file_is_computed_instead(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    first = Worker(family, tmp_path)
    first.say(family, DOCUMENT, 40)
    first.close()
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    again = Worker(family, tmp_path)
    with caplog.at_level(logging.WARNING, "sluice.prefix_store"):
        assert again.say(family, DOCUMENT, 40) == 0
    again.close()
    assert any("is removed" in record.message for record in caplog.records)


def loads(worker: Worker) -> list[PromptProgress]:
    """Take a step, and return the progress of loads in it."""
    return [each for each in worker.step().outcomes if isinstance(each, PromptProgress) and each.phase == "loading"]


def test_loading_is_reported_and_wakes_the_engine(tmp_path: Path) -> None:
    first = Worker("llama", tmp_path)
    first.say("llama", DOCUMENT)
    first.close()
    again = Worker("llama", tmp_path)
    again.add("late", DOCUMENT, max_tokens=ANSWER)
    reports = loads(again)
    assert again.woken.wait(20)
    while len(again.engine):
        reports += loads(again)
    again.close()
    assert reports[-1].done == reports[-1].total >= len(DOCUMENT) - 1
    assert reports[0].done == 0 or len(reports) == 1


def test_other_rows_decode_while_a_prefix_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Worker("llama", tmp_path)
    first.say("llama", DOCUMENT)
    first.close()
    again = Worker("llama", tmp_path)
    held = threading.Event()
    reader = again.engine._caches.prefix.disk.store.reader  # type: ignore[union-attr]
    read = reader._read_segment

    def slow(*arguments: Any) -> Any:
        assert held.wait(20)
        return read(*arguments)

    monkeypatch.setattr(reader, "_read_segment", slow)
    again.add("late", DOCUMENT, max_tokens=ANSWER)
    again.add("short", prompt(9, 3), max_tokens=ANSWER)
    while not again.generated["short"]:
        again.step()
    assert not reader._unlimited.is_set()  # it reads slowly
    while "short" not in again.ended:
        again.step()
    assert reader._unlimited.is_set()
    assert not again.generated["late"]
    for _ in range(3):
        again.step()
    assert not again.engine.needs_step
    held.set()
    assert again.woken.wait(20)
    assert again.engine.needs_step
    while len(again.engine):
        again.step()
    again.close()
    assert tuple(again.generated["late"]) == lonely("llama", DOCUMENT, ANSWER)
    assert again.cached["late"] >= len(DOCUMENT) - 1


def test_an_array_is_filled_and_read_on_another_thread() -> None:
    filled = list[mx.array]()

    def fill() -> None:
        array = Arrays(lambda: None).allocate(6)()
        memoryview(array).cast("B")[:] = bytes(range(6))  # type: ignore[arg-type]
        filled.append(array)
        clear_streams()

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    assert np.array(filled[0].view(mx.uint16)).tobytes() == bytes(range(6))
    half = mx.array([1.0, 2.0], mx.bfloat16)
    mx.eval(half)
    assert memoryview(half).cast("B").tobytes() == b"\x80\x3f\x00\x40"  # type: ignore[arg-type]


# The reader's time, and memory


def stored(family: str, folder: Path, *prompts: tuple[int, ...]) -> None:
    """Let a worker answer these prompts and end."""
    first = Worker(family, folder)
    for tokens in prompts:
        first.say(family, tokens, 40)
    first.close()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let files be read only after the event is set."""
    go = threading.Event()
    read_segment = Reader._read_segment

    def hang(*arguments: Any) -> Any:
        assert go.wait(20)
        return read_segment(*arguments)

    monkeypatch.setattr(Reader, "_read_segment", hang)
    yield go
    go.set()


def test_a_prompt_is_computed_when_the_folder_hangs(
    tmp_path: Path, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored("llama", tmp_path, DOCUMENT)
    monkeypatch.setattr("worker.engine.prefill.queue.load_limit_s", lambda *_, **__: 0.05)
    again = Worker("llama", tmp_path)
    with caplog.at_level(logging.WARNING, "sluice.prefix_store"):
        assert again.say("llama", DOCUMENT) == 0
        assert again.say("llama", (*DOCUMENT, 5)) >= len(DOCUMENT) - 1  # from memory
        assert again.say("llama", DOCUMENT, namespace="a") == 0  # nothing is asked of the folder meanwhile
    assert len(caplog.records) == 1
    hanging.set()
    again.close()


async def test_the_engine_thread_computes_a_prompt_when_the_folder_hangs(
    tmp_path: Path, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker.engine.prefill.queue.load_limit_s", lambda *_, **__: 0.05)
    options = StoreOptions(tmp_path, 10**9)
    for _ in range(2):
        engine = EngineThread(lambda: model("llama"), EngineOptions(0.1, disk=options), on_failure=unreached)
        await engine.start()
        tokens = await asyncio.wait_for(answered(engine, GenerationRequest("a", DOCUMENT, ANSWER)), 30)
        await engine.stop()
    assert "were not read within" in caplog.text
    assert tuple(tokens) == lonely("llama", DOCUMENT, ANSWER)


def unreached() -> None:
    raise AssertionError("the engine's thread has failed")


async def answered(engine: EngineThread, request: GenerationRequest) -> list[int]:
    """Return the tokens of the answer."""
    tokens, ended = list[int](), asyncio.Event()

    def on_outcome(outcome: Outcome, rows: int) -> None:
        if isinstance(outcome, Sampled):
            tokens.append(outcome.token or 0)
            if outcome.finish_reason:
                ended.set()

    engine.submit(request, on_outcome)
    await ended.wait()
    return tokens


@SOME
def test_prompts_with_the_same_prefix_on_disk_share_one_reading(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(family, tmp_path, DOCUMENT, DOCUMENT + prompt(30, 1))
    read = list[Any]()
    read_segment = Reader._read_segment
    monkeypatch.setattr(Reader, "_read_segment", lambda *given: read.append(given[1]) or read_segment(*given))
    again = Worker(family, tmp_path)
    rows = [DOCUMENT + prompt(20, 500 + number) for number in range(5)]
    for number, tokens in enumerate(rows):
        again.add(f"row {number}", tokens, max_tokens=ANSWER, boundaries=(40, len(DOCUMENT)))
    while len(again.engine):
        again.step()
    again.close()
    assert len(read) == len({*read})
    for number, tokens in enumerate(rows):
        assert tuple(again.generated[f"row {number}"]) == lonely(family, tokens, ANSWER)
        assert again.cached[f"row {number}"] >= 40


def test_the_bytes_of_a_load_are_reserved(tmp_path: Path, hanging: threading.Event) -> None:
    stored("llama", tmp_path, DOCUMENT)
    again = Worker("llama", tmp_path)
    prefix = again.engine._caches.prefix
    assert prefix is not None
    again.say("llama", prompt(300, 10))
    held = prefix._tree.nbytes
    again.add("late", DOCUMENT, max_tokens=ANSWER)
    again.step()
    loading = prefix.disk.loading_bytes  # type: ignore[union-attr]
    assert loading > 0
    prefix.set_limit(held + loading // 2)
    assert prefix._tree.nbytes + loading <= held + loading // 2
    hanging.set()
    while len(again.engine):
        again.step()
    assert again.cached["late"] >= len(DOCUMENT) - 1
    again.close()


def test_a_load_ends_when_rows_need_its_memory(tmp_path: Path, hanging: threading.Event) -> None:
    stored("llama", tmp_path, DOCUMENT)
    again = Worker("llama", tmp_path)
    prefix = again.engine._caches.prefix
    assert prefix is not None
    again.add("late", DOCUMENT, max_tokens=ANSWER)
    again.step()
    prefix.set_limit(prefix.disk.loading_bytes - 1)  # type: ignore[union-attr]
    assert prefix.disk.loading_bytes == 0  # type: ignore[union-attr]
    while len(again.engine):
        again.step()
    hanging.set()
    again.close()
    assert tuple(again.generated["late"]) == lonely("llama", DOCUMENT, ANSWER)


@SOME
def test_a_load_that_does_not_fit_beside_another_takes_the_memory_of_its_own_row(
    tmp_path: Path, hanging: threading.Event, family: str
) -> None:
    other = prompt(300, 77)
    stored(family, tmp_path, DOCUMENT, other)
    again = Worker(family, tmp_path)
    prefix = again.engine._caches.prefix
    assert prefix is not None
    again.add("one", DOCUMENT, max_tokens=ANSWER)
    again.step()
    loading = prefix.disk.loading_bytes  # type: ignore[union-attr]
    assert loading > 0
    prefix._max_bytes = loading * 3 // 2
    again.add("other", other, max_tokens=ANSWER)
    again.step()
    assert prefix.disk.loading_bytes == loading  # type: ignore[union-attr]
    hanging.set()
    while len(again.engine):
        again.step()
    again.close()
    assert again.cached["one"] >= len(DOCUMENT) - 1
    assert again.cached["other"] >= len(other) - 1
    assert tuple(again.generated["other"]) == lonely(family, other, ANSWER)


@SOME
def test_a_row_whose_cache_cannot_be_computed_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    def fail(cache: Any) -> None:
        raise RuntimeError("kumquat")

    stored(family, tmp_path, DOCUMENT)
    again = Worker(family, tmp_path)
    prefix = again.engine._caches.prefix
    assert prefix is not None
    load = prefix.read_for_row("", DOCUMENT, lambda _: 60.0, 10**9)
    assert load is not None
    until = time.monotonic() + 20
    while not load.reading.done:
        assert time.monotonic() < until
        time.sleep(0.005)
    with monkeypatch.context() as patch:
        patch.setattr("worker.engine.prefix.cache.slots.materialize", fail)
        assert prefix.restore_row(load.reading, len(DOCUMENT)) is None
    restored = prefix.restore_row(load.reading, len(DOCUMENT))
    assert restored is not None
    assert restored[1] > 0
    again.close()


@SOME
def test_non_finite_files_are_removed_if_memory_holds_their_start(tmp_path: Path, family: str) -> None:
    """Evicted is the end of the prefix only, so that no chain of files reaches it from the start."""
    run = Worker(family, tmp_path)
    run.say(family, DOCUMENT, 40)
    prefix = run.engine._caches.prefix
    assert prefix is not None
    limit = prefix._tree.nbytes - 1
    prefix.set_limit(limit)
    settled_writes(run)
    assert list(tmp_path.glob("*.safetensors"))
    prefix.forget_non_finite("", (*DOCUMENT, *lonely(family, DOCUMENT, ANSWER)))
    settled_writes(run)
    until = time.monotonic() + 20
    while list(tmp_path.glob("*.safetensors")):
        assert time.monotonic() < until
        time.sleep(0.005)
    run.close()


@SOME
@pytest.mark.parametrize("read", [False, True])
def test_a_load_of_non_finite_files_ends_without_a_result(
    tmp_path: Path, hanging: threading.Event, family: str, read: bool
) -> None:
    other = prompt(300, 77)
    stored(family, tmp_path, DOCUMENT, other)
    again = Worker(family, tmp_path)
    prefix = again.engine._caches.prefix
    assert prefix is not None
    for number, tokens in enumerate((DOCUMENT, other)):
        again.add(f"row {number}", tokens, max_tokens=ANSWER)
    again.step()
    if read:
        hanging.set()
        readings = [*prefix.disk.store.reader._readings]  # type: ignore[union-attr]
        until = time.monotonic() + 20
        while not all(reading.done for reading in readings):
            assert time.monotonic() < until
            time.sleep(0.005)
    prefix.forget_non_finite("", DOCUMENT)
    hanging.set()
    while len(again.engine):
        again.step()
    again.close()
    assert again.cached["row 0"] == 0
    assert again.cached["row 1"] >= len(other) - 1
    assert tuple(again.generated["row 0"]) == lonely(family, DOCUMENT, ANSWER)


def settled_writes(run: Worker) -> None:
    """Wait until nothing waits to be written."""
    prefix = run.engine._caches.prefix
    assert prefix is not None
    until = time.monotonic() + 20
    while prefix.disk.store.writer.pending_bytes:  # type: ignore[union-attr]
        assert time.monotonic() < until
        time.sleep(0.002)


# What a load continues

PART = DOCUMENT[:100]


def parts_on_disk(family: str, folder: Path) -> tuple[int, int]:
    """Store a document in two files or more. Return the bytes of the segments of its first part, and of the files that
    continue it."""
    first = Worker(family, folder)
    first.say(family, PART)
    first.say(family, DOCUMENT, len(PART) - 1)
    first.close()
    second = Worker(family, folder)
    second.say(family, PART)
    prefix = second.engine._caches.prefix
    assert prefix is not None
    disk, tree = prefix.disk, prefix._tree
    assert disk is not None
    chain = disk.find("", DOCUMENT[:-1], prefix.match_length("", DOCUMENT[:-1]))
    assert chain is not None
    path, _ = tree.walk("", DOCUMENT[: chain.start])
    second.close()
    assert chain.start >= len(PART) - 1
    return sum(node.segment.nbytes for node in path if node.segment), chain.nbytes


@SOME
def test_a_load_that_does_not_fit_beside_what_it_continues_is_not_begun(tmp_path: Path, family: str) -> None:
    held_bytes, file_bytes = parts_on_disk(family, tmp_path)
    run = Worker(family, tmp_path, prefix_bytes=file_bytes + held_bytes // 2)
    run.say(family, PART)
    assert run.say(family, DOCUMENT, len(PART) - 1) >= len(PART) - 1
    run.close()


@SOME
def test_a_load_keeps_the_segments_that_it_continues(tmp_path: Path, family: str) -> None:
    """The state in memory at their end does not fit beside the load, and is not needed."""
    held_bytes, file_bytes = parts_on_disk(family, tmp_path)
    run = Worker(family, tmp_path, prefix_bytes=held_bytes + file_bytes)
    run.say(family, PART)
    assert run.say(family, DOCUMENT, len(PART) - 1) >= len(DOCUMENT) - 1
    run.close()


# What is stored on request


def store_prefix(run: Worker, tokens: tuple[int, ...]) -> StoreResult:
    """Store a prefix, and wait until that is done."""
    attempt: StoreResult | Storing | None = None
    until = time.monotonic() + 20
    while not isinstance(attempt, StoreResult):
        assert time.monotonic() < until
        time.sleep(0.002)
        attempt = run.engine.store_prefix("", tokens, attempt)
    return attempt


@SOME
def test_a_prefix_is_stored_and_pinned_on_request(tmp_path: Path, family: str) -> None:
    run = Worker(family, tmp_path)
    run.say(family, DOCUMENT, 40)
    first, second = (store_prefix(run, DOCUMENT[:-1]) for _ in range(2))
    run.close()
    assert (first.tokens, first.missing) == (len(DOCUMENT) - 1, None)
    assert first.written_bytes > 0
    assert second == StoreResult(first.tokens)
    store = PrefixStore(StoreOptions(tmp_path, 1), "another model")
    store.open()  # enforces the quota
    store.close(5)
    again = Worker(family, tmp_path)
    assert again.say(family, DOCUMENT, 40) == len(DOCUMENT) - 1
    again.close()


@SOME
def test_a_pinned_prefix_ends_where_its_prompt_ends_also_if_another_continues_it(tmp_path: Path, family: str) -> None:
    run = Worker(family, tmp_path)
    run.say(family, DOCUMENT, 40)
    first = store_prefix(run, DOCUMENT[:-1])
    longer = (*DOCUMENT, *DOCUMENT[:50])
    run.say(family, longer, 40)
    second = store_prefix(run, longer[:-1])
    run.close()
    pinned = {each.tokens for each in Listing(tmp_path).prefixes if each.pinned}
    assert pinned == {first.tokens, second.tokens}


def test_a_prefix_that_another_one_continues_is_stored_up_to_its_end(tmp_path: Path) -> None:
    run = Worker("llama", tmp_path)
    run.say("llama", DOCUMENT)
    assert store_prefix(run, DOCUMENT[:77]).tokens == 77
    run.engine._caches.set_limit(0)
    settled(run)
    run.close()
    again = Worker("llama", tmp_path)
    assert again.say("llama", (*DOCUMENT[:77], *prompt(9, 8))) == 77
    again.close()


def refusal_of(run: Worker, tokens: tuple[int, ...]) -> NotStored | None:
    """Return why nothing of a prefix is on disk after an attempt to store it."""
    result = store_prefix(run, tokens)
    run.close()
    assert (result.tokens, result.written_bytes) == (0, 0)
    return result.missing


@SOME
def test_a_prefix_that_exceeds_the_quota_is_reported(tmp_path: Path, family: str) -> None:
    run = Worker(family, tmp_path, max_bytes=1000)
    run.say(family, DOCUMENT, 40)
    assert refusal_of(run, DOCUMENT[:-1]) is NotStored.QUOTA


@SOME
def test_a_prefix_that_memory_does_not_hold_is_reported(tmp_path: Path, family: str) -> None:
    run = Worker(family, tmp_path, prefix_bytes=1000)
    run.say(family, DOCUMENT, 40)
    assert refusal_of(run, DOCUMENT[:-1]) is NotStored.NOT_CACHED


def test_a_prefix_that_is_too_short_for_a_state_is_reported(tmp_path: Path) -> None:
    run = Worker("qwen3_5", tmp_path)
    run.say("qwen3_5", DOCUMENT[:12])
    assert refusal_of(run, DOCUMENT[:11]) is NotStored.TOO_SHORT


def test_without_a_folder_nothing_is_stored() -> None:
    run = Run(model("llama"), step_s=0.02, prefix_bytes=10**9)
    assert run.engine.store_prefix("", DOCUMENT) == StoreResult(0, missing=NotStored.NO_FOLDER)


# Preempted rows


def begun(family: str, folder: Path, **options: Any) -> Worker:
    """Return a worker with a row that has got a part of its answer."""
    run = Worker(family, folder, **options)
    run.add("row", DOCUMENT, max_tokens=ANSWER, lane="batch")
    run.until(lambda: len(run.generated["row"]) >= 2)
    return run


def continued(run: Worker, family: str) -> int:
    """Let the preempted row continue, to the right end; return the number of tokens that it has not computed again."""
    run.readmit()
    while len(run.engine):
        run.step()
    run.close()
    assert tuple(run.generated["row"]) == lonely(family, DOCUMENT, ANSWER)
    return run.cached["row"]


@pytest.mark.parametrize(
    ("family", "urgent"),
    [pytest.param("llama", 300, id="no memory is left for prefixes"), ("llama", 1500), ("qwen3_5", 1500)],
)
def test_an_offline_row_whose_memory_another_needs_continues_from_the_disk(
    tmp_path: Path, family: str, urgent: int
) -> None:
    costs = replace(model(family).costs, weights_bytes=mx.get_active_memory())
    memory = costs.peak_bytes([[urgent + ANSWER]])  # so both rows do not fit together, nor a row and a saved cache
    run = begun(family, tmp_path, opened=replace(model(family), costs=costs), memory=memory)
    run.add("urgent", prompt(urgent, 5), max_tokens=ANSWER)
    assert run.step().num_preemptions == 1
    assert run.held_bytes == 0
    delivered = len(run.generated["row"])
    settled_writes(run)
    run.until(lambda: "urgent" in run.ended)
    assert continued(run, family) == len(DOCUMENT) + delivered - 1


@SOME
def test_a_preempted_row_is_not_written_if_computing_it_is_faster(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engine.prefill.queue.load_limit_s", lambda *_, **__: None)
    run = begun(family, tmp_path)
    run.preempt("row")
    run.spill()
    settled_writes(run)
    assert not [*tmp_path.glob("*.safetensors")]
    assert continued(run, family) <= len(DOCUMENT) - 1  # its prompt is in memory


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let files be written only after the event is set, and be of 64 tokens at most."""
    go = threading.Event()
    write = Writer._write

    def hang(*arguments: Any) -> Any:
        assert go.wait(20)
        return write(*arguments)

    monkeypatch.setattr(Writer, "_write", hang)
    monkeypatch.setattr("worker.engine.prefix.disk.MAX_SEGMENT_TOKENS", 64)
    yield go
    go.set()


@pytest.mark.parametrize(("family", "found"), [("llama", 64), ("qwen3_5", 0)])
def test_what_may_not_wait_of_a_preempted_row_is_computed(
    tmp_path: Path, family: str, found: int, full: threading.Event
) -> None:
    run = begun(family, tmp_path, prefix_bytes=1, max_pending_bytes=1)
    run.preempt("row")
    run.spill()  # the first file may wait alone; it is useless without the state
    full.set()
    settled_writes(run)
    run.engine._caches.prefix._max_bytes = 10**9  # type: ignore[union-attr]
    assert continued(run, family) == found
