"""Prefixes that were evicted, or whose worker was restarted, are loaded from disk, and change no token."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.cache.test_prefix import ALL, SOME, SYSTEM, lonely
from tests.engine.driver import Run
from tests.engine.tiny import model, prompt
from worker.engine.cache.disk import DiskTier, _allocate
from worker.prefix_store.store import StoreOptions
from worker.schedule.outcomes import Loaded

ANSWER = 6
DOCUMENT = prompt(300, 9)


@pytest.fixture(autouse=True)
def always_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes a prefix faster than a disk reads it."""
    monkeypatch.setattr("worker.engine.prefill.queue.is_worth_loading", lambda *_, **__: True)


class Worker(Run):
    """An engine with a folder for its prefixes."""

    def __init__(self, family: str, folder: Path, *, prefix_bytes: int = 10**9, max_bytes: int = 10**9) -> None:
        self.woken = threading.Event()
        self.loaded: dict[str, list[Loaded]] = {}
        super().__init__(
            model(family),
            prefix_bytes=prefix_bytes,
            open_tier=lambda opened: DiskTier(
                opened.network, opened.fingerprint, StoreOptions(folder, max_bytes), self.woken.set
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


@ALL
def test_what_is_loaded_is_byte_equal_to_what_was_stored(tmp_path: Path, family: str) -> None:
    first = Worker(family, tmp_path)
    first.say(family, DOCUMENT, 40)
    stored = cached(first, DOCUMENT)
    first.close()
    again = Worker(family, tmp_path)
    again.say(family, DOCUMENT, 40)
    found = cached(again, DOCUMENT)
    again.close()
    assert stored.keys() <= found.keys()
    assert all(found[end] == content for end, content in stored.items())


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


def test_loading_is_reported_and_wakes_the_engine(tmp_path: Path) -> None:
    first = Worker("llama", tmp_path)
    first.say("llama", DOCUMENT)
    first.close()
    again = Worker("llama", tmp_path)
    again.add("late", DOCUMENT, max_tokens=ANSWER)
    reports = [outcome for outcome in again.step().outcomes if isinstance(outcome, Loaded)]
    assert again.woken.wait(20)
    while len(again.engine):
        reports += [outcome for outcome in again.step().outcomes if isinstance(outcome, Loaded)]
    again.close()
    assert reports[-1].done == reports[-1].total >= len(DOCUMENT) - 1
    assert reports[0].done == 0 or len(reports) == 1


def test_other_rows_decode_while_a_prefix_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Worker("llama", tmp_path)
    first.say("llama", DOCUMENT)
    first.close()
    again = Worker("llama", tmp_path)
    held = threading.Event()
    read = again.engine._caches.prefix._durable._tier._store._read_place  # type: ignore[union-attr]

    def slow(*arguments: Any) -> Any:
        assert held.wait(20)
        return read(*arguments)

    monkeypatch.setattr(again.engine._caches.prefix._durable._tier._store, "_read_place", slow)  # type: ignore[union-attr]
    again.add("late", DOCUMENT, max_tokens=ANSWER)
    again.add("short", prompt(9, 3), max_tokens=ANSWER)
    while "short" not in again.ended:
        again.step()
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
        array = _allocate(6)
        memoryview(array).cast("B")[:] = bytes(range(6))  # type: ignore[arg-type]
        filled.append(array)

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    assert np.array(filled[0].view(mx.uint16)).tobytes() == bytes(range(6))
    half = mx.array([1.0, 2.0], mx.bfloat16)
    mx.eval(half)
    assert memoryview(half).cast("B").tobytes() == b"\x80\x3f\x00\x40"  # type: ignore[arg-type]
