"""Whatever fails costs the row that it belongs to, and the others nothing but time."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.tiny import CONFIGS, alone, model, network, prompt, write_checkpoint
from worker.engine.batch import decode_batch as rows_module
from worker.engine.batch.decode_batch import DecodeBatch
from worker.engine.batch.row import Row
from worker.engine.cache.slot_kv import SlotKVCache, SlotRotatingKVCache
from worker.engine.cache.slots import SlotArraysCache
from worker.engine.engine import EngineBroken
from worker.engine.model.load import open_model
from worker.engine.prefill import base as prefill_module
from worker.engine.thread import EngineThread
from worker.schedule.outcomes import Outcome, Sampled
from worker.schedule.request import GenerationRequest

QWEN = "qwen3_5"
NEIGHBOURS = {"a": 3, "b": 40, "c": 17, "d": 64, "e": 9}  # prompt tokens
ANSWER = 24
LONGEST = 64 + ANSWER
GUILTY = prompt(12, 99)


@cache
def lonely(family: str, tokens: tuple[int, ...]) -> list[int]:
    return alone(network(family), tokens, ANSWER)


def asked(id: str) -> tuple[int, ...]:
    return prompt(NEIGHBOURS[id], ord(id))


def beside(run: Run, *, first: int = 3) -> None:
    """Some neighbours; the others come later."""
    for id in list(NEIGHBOURS)[:first]:
        run.add(id, asked(id), max_tokens=ANSWER)
        run.step()


def others(run: Run) -> None:
    for id in list(NEIGHBOURS):
        if id not in run.said:
            run.add(id, asked(id), max_tokens=ANSWER)
            run.step()


def all_is_well(run: Run, family: str = QWEN, *, guilty: str | None = None) -> None:
    """To the end. Everybody says what it says alone, up to where the guilty one fails."""
    run.drain(most=500)
    tokens = {id: asked(id) if id in NEIGHBOURS else GUILTY for id in run.said}
    for id, said in run.said.items():
        expected = lonely(family, tokens[id])
        assert said == (expected[: len(said)] if id == guilty else expected), id
    assert {id for id, ending in run.ended.items() if ending == "faulted"} == ({guilty} - {None})
    assert set(run.ended) == set(run.said)


class Counting:
    """Allows everything, and breaks down at one token of the answer."""

    error = None

    def __init__(self, at: int) -> None:
        self._at, self._heard = at, 0

    def accept(self, token: int) -> None:
        self._heard += 1

    def reset(self) -> None:
        self._heard = 0

    def bitmask(self) -> bytes | None:
        if self._heard >= self._at:
            raise RuntimeError("no such rule")
        return None


@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_guide_that_raises_fails_its_own_row(at: int) -> None:
    run = Run(model(QWEN))
    beside(run)
    run.add("guilty", GUILTY, max_tokens=ANSWER, grammar=Counting(at))
    others(run)
    all_is_well(run, guilty="guilty")
    assert len(run.said["guilty"]) <= at


@contextmanager
def poisoned(family: str) -> Iterator[int]:
    """A token that nobody says, and whose embedding is NaN."""
    said = {token for tokens in [GUILTY, *map(asked, NEIGHBOURS)] for token in lonely(family, tokens)}
    token = next(token for token in range(3, 10) if token not in said)  # in no prompt either
    layer = network(family).language_model.model if family == QWEN else network(family).model
    weight = layer.embed_tokens.weight
    whole = mx.array(weight)
    weight[token] = float("nan")
    try:
        yield token
    finally:
        layer.embed_tokens.weight = whole


@pytest.mark.parametrize("place", [0, 5, 11], ids=["first", "within", "last"])
@pytest.mark.parametrize("family", [QWEN, "gpt_oss", "deepseek_v3", "gemma3", "falcon_h1", "jamba"])
def test_a_row_whose_embedding_is_nan_fails_alone(family: str, place: int) -> None:
    run = Run(model(family))
    beside(run)
    with poisoned(family) as poison:
        run.add("guilty", (*GUILTY[:place], poison, *GUILTY[place + 1 :]), max_tokens=ANSWER)
        others(run)
        all_is_well(run, family, guilty="guilty")
    assert run.said["guilty"] == []


def test_logits_of_infinity_fail_their_row() -> None:
    class Mad(Counting):
        def bitmask(self) -> bytes | None:
            return bytes(128) if self._heard == self._at else None  # no token at all

    run = Run(model(QWEN))
    beside(run)
    run.add("guilty", GUILTY, max_tokens=ANSWER, grammar=Mad(5))
    others(run)
    all_is_well(run, guilty="guilty")
    assert len(run.said["guilty"]) == 5


def raising(whether: Callable[..., bool], call: Callable[..., Any]) -> Callable[..., Any]:
    def raises(*args: Any, **kwargs: Any) -> Any:
        if whether(*args, **kwargs):
            raise RuntimeError("[malloc] Unable to allocate 1000000000 bytes.")
        return call(*args, **kwargs)

    return raises


def once(whether: Callable[..., bool] = lambda *args, **kwargs: True) -> Callable[..., bool]:
    left = [True]

    def asked_once(*args: Any, **kwargs: Any) -> bool:
        return whether(*args, **kwargs) and bool(left) and left.pop()

    return asked_once


@pytest.mark.parametrize("part", ["forward", "collect"], ids=["when it is launched", "when it is waited for"])
@pytest.mark.parametrize("after", [0, 1, 6])
def test_a_step_that_fails_once_costs_no_row_a_token(monkeypatch: pytest.MonkeyPatch, part: str, after: int) -> None:
    run = Run(model(QWEN))
    beside(run)
    others(run)
    run.until(lambda: len(run.said["e"]) >= after)
    if part == "forward":
        monkeypatch.setattr(rows_module, "forward", raising(once(), rows_module.forward))
    else:
        monkeypatch.setattr(DecodeBatch, "collect", raising(once(), DecodeBatch.collect))
    all_is_well(run)


@pytest.mark.parametrize("after", [0, 1, 6])
def test_a_row_that_fails_every_step_it_is_in_fails_alone(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    def spoilt(network: Any, cache: Any, rows: list[Row], tokens: mx.array) -> bool:
        return any(row.id == "guilty" and len(row.answer) >= after for row in rows)

    monkeypatch.setattr(rows_module, "forward", raising(spoilt, rows_module.forward))
    run = Run(model(QWEN))
    beside(run)
    run.add("guilty", GUILTY, max_tokens=ANSWER)
    others(run)
    all_is_well(run, guilty="guilty")


def test_two_guilty_rows_fail_in_the_same_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(network: Any, cache: Any, rows: list[Row], tokens: mx.array) -> bool:
        return any(row.id.startswith("guilty") and row.answer for row in rows)

    monkeypatch.setattr(rows_module, "forward", raising(spoilt, rows_module.forward))
    run = Run(model(QWEN))
    beside(run)
    for id in ("guilty 1", "guilty 2"):
        run.add(id, GUILTY, max_tokens=ANSWER)
    run.until(lambda: set(run.ended) >= {"guilty 1", "guilty 2"})
    assert {run.ended["guilty 1"], run.ended["guilty 2"]} == {"faulted"}
    run.drain()
    assert all(run.said[id] == lonely(QWEN, asked(id)) for id in ("a", "b", "c"))


def test_rows_that_are_parked_or_cancelled_while_they_come_again_say_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(model(QWEN), step_s=0.0)
    beside(run)
    others(run)
    run.until(lambda: len(run.said["e"]) >= 6)
    monkeypatch.setattr(DecodeBatch, "collect", raising(once(), DecodeBatch.collect))
    run.step()
    monkeypatch.undo()
    for id in [id for id in run.inside if id != "b"]:
        run.park(id)
    run.engine.remove("b")
    del run.said["b"]
    run.ended.pop("b", None)
    run.stir()
    all_is_well(run)


@contextmanager
def failing_once(name: str) -> Iterator[None]:
    """One call of one layer."""
    fails = once()
    with pytest.MonkeyPatch.context() as patch:
        for kind in SlotKVCache, SlotArraysCache, SlotRotatingKVCache:
            if name in vars(kind):
                patch.setattr(kind, name, raising(fails, vars(kind)[name]))
        yield
        assert not fails(), "nothing of the kind was called"


FAMILIES = pytest.mark.parametrize("family", [QWEN, "gemma3"])


@FAMILIES
def test_a_row_that_cannot_join_the_running_ones_fails_alone(family: str) -> None:
    run = Run(model(family))
    run.group_by(ONE_GROUP)
    beside(run)
    run.until(lambda: bool(run.said["a"]))
    run.until(lambda: not run.engine._prefills)
    run.add("guilty", GUILTY, max_tokens=ANSWER)
    with failing_once("extend"):
        run.until(lambda: "guilty" in run.ended)
    others(run)
    all_is_well(run, family, guilty="guilty")
    assert run.said["guilty"] == []


@FAMILIES
def test_a_first_row_that_cannot_begin_a_batch_leaves_the_engine_as_it_was(family: str) -> None:
    run = Run(model(family))
    for i in range(6):
        run.add(f"guilty {i}", GUILTY, max_tokens=ANSWER)
        with failing_once("extend"):
            run.drain()
    assert set(run.ended.values()) == {"faulted"}
    run.add("a", asked("a"), max_tokens=ANSWER)
    assert run.drain()["a"] == lonely(family, asked("a"))


@FAMILIES
@pytest.mark.parametrize("name", ["moved", "filter"])
def test_a_cache_that_cannot_let_a_row_go_costs_no_row_a_token(family: str, name: str) -> None:
    run = Run(model(family))
    run.group_by(ONE_GROUP)
    run.add("short", prompt(5, 1), max_tokens=4)
    beside(run, first=5)
    with failing_once(name):
        run.until(lambda: "short" in run.ended)
        run.step()
    del run.said["short"], run.ended["short"]
    all_is_well(run, family)


@FAMILIES
@pytest.mark.parametrize("name", ["moved", "filter"])
def test_a_cache_that_cannot_let_a_cancelled_row_go_costs_no_row_a_token(family: str, name: str) -> None:
    run = Run(model(family))
    run.group_by(ONE_GROUP)
    run.add("cancelled", prompt(5, 1), max_tokens=ANSWER)
    beside(run, first=5)
    run.until(lambda: bool(run.said["e"]))
    with failing_once(name):
        run.engine.remove("cancelled")
        run.step()
    del run.said["cancelled"]
    all_is_well(run, family)


def crowded(family: str) -> Run:
    """Three offline rows that decode, and no room for another."""
    costs = model(family).costs
    spare = costs.row_bytes(1)  # for one that is parked with its cache
    run = Run(model(family), memory=costs.peak_bytes([[LONGEST] * 3]) + spare)
    run.group_by(ONE_GROUP)
    for id in ("a", "c", "d"):
        run.add(id, asked(id), max_tokens=ANSWER, lane="batch")
    run.until(lambda: all(run.said.values()))
    return run


@FAMILIES
def test_a_row_whose_cache_cannot_be_taken_out_costs_no_row_a_token(family: str) -> None:
    run = crowded(family)
    run.add("b", asked("b"), max_tokens=ANSWER)
    with failing_once("extract"):
        run.step()
    assert not run.ended
    all_is_well(run, family)


@FAMILIES
def test_a_row_that_cannot_come_back_with_its_cache_comes_back_without(family: str) -> None:
    run = crowded(family)
    run.add("b", asked("b"), max_tokens=6)
    run.step()
    assert run.waiting == ["d"]
    with failing_once("extend"):
        run.until(lambda: not run.waiting)
    run.ended.pop("b", None)
    del run.said["b"]
    all_is_well(run, family)


@FAMILIES
def test_rows_that_cannot_be_moved_to_another_group_lose_no_token(family: str) -> None:
    run = Run(model(family))
    run.group_by(ONE_GROUP)
    beside(run, first=5)
    run.until(lambda: all(run.said.values()))
    run.group_by(EACH_ALONE)
    with failing_once("extend"):
        run.step()
    all_is_well(run, family)


def test_a_prompt_that_runs_out_of_memory_fails_alone() -> None:
    run = Run(model(QWEN), step_s=0.0)
    beside(run)
    run.add("guilty", prompt(40, 99), max_tokens=ANSWER)
    with pytest.MonkeyPatch.context() as patch:
        whole = type(network(QWEN)).__call__

        def large(self: Any, tokens: mx.array, cache: Any) -> bool:
            return tokens.shape[1] > 1

        run.until(lambda: [row.id for row in run.engine._prefills.rows] == ["guilty"])
        patch.setattr(type(network(QWEN)), "__call__", raising(once(large), whole))
        run.until(lambda: "guilty" in run.ended)
    others(run)
    all_is_well(run, guilty="guilty")


def test_a_row_that_cannot_be_taken_in_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(model(QWEN))
    beside(run, first=1)
    run.until(lambda: bool(run.said["a"]))
    run.add("guilty", GUILTY, max_tokens=ANSWER)
    run.add("b", asked("b"), max_tokens=ANSWER)
    monkeypatch.setattr(prefill_module, "make_prompt_cache", raising(once(), prefill_module.make_prompt_cache))
    others(run)
    all_is_well(run, guilty="guilty")


def always(*args: Any, **how: Any) -> bool:
    return True


def test_ten_failures_in_a_row_are_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "forward", raising(always, rows_module.forward))
    run = Run(model(QWEN))
    for i in range(20):
        run.add(str(i), GUILTY, max_tokens=4)
    with pytest.raises(EngineBroken, match="10 "):
        run.drain()


def test_ten_prompts_that_fail_in_a_row_are_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(network(QWEN)), "__call__", raising(always, type(network(QWEN)).__call__))
    run = Run(model(QWEN))
    for i in range(20):
        run.add(str(i), GUILTY, max_tokens=4)
    with pytest.raises(EngineBroken, match="10 "):
        run.drain()


def test_failures_with_answers_between_them_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(model(QWEN))
    for i in range(15):
        run.add(f"guilty {i}", GUILTY, max_tokens=4, grammar=Counting(0))
        run.add(f"good {i}", asked("a"), max_tokens=ANSWER)
        run.drain()
        assert run.said[f"good {i}"] == lonely(QWEN, asked("a"))
        assert run.ended[f"guilty {i}"] == "faulted"


async def test_an_engine_that_fails_ten_times_calls_for_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, died, heard = write_checkpoint(CONFIGS["llama"], tmp_path), asyncio.Event(), list[Outcome]()

    class Ear:
        def on_outcome(self, outcome: Outcome, rows: int) -> None:
            heard.append(outcome)

    engine = EngineThread(lambda: open_model(str(checkpoint)), step_s=0.1, died=died.set)
    await engine.start()
    monkeypatch.setattr(rows_module, "forward", raising(always, rows_module.forward))
    for i in range(20):
        engine.submit(GenerationRequest(str(i), GUILTY, 5), Ear())
    await asyncio.wait_for(died.wait(), 20)
    await engine.stop()
    assert "10 steps in a row have failed" in caplog.text
    # Those that were not found guilty by then are in the queue's hands again.
    assert not any(isinstance(outcome, Sampled) for outcome in heard)
