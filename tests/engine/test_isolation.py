"""Whatever fails costs the row that it belongs to, and the others nothing but time."""

import ast
import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.stepwise_grammar import StepwiseGrammar
from tests.engine.tiny import CONFIGS, alone, model, network, prompt, write_checkpoint
from worker.engine import isolation
from worker.engine.batch import decode_batch as rows_module
from worker.engine.batch.decode_batch import DecodeBatch
from worker.engine.batch.row import Row
from worker.engine.cache.kv import SlotKVCache
from worker.engine.cache.recurrent import SlotArraysCache
from worker.engine.cache.rotating import SlotRotatingKVCache
from worker.engine.isolation import EngineBroken
from worker.engine.model.load import open_model
from worker.engine.options import EngineOptions
from worker.engine.prefill import spans as prefill_module
from worker.engine.prefill.queue import PrefillQueue
from worker.engine.thread import EngineThread
from worker.outcomes import Outcome, Sampled
from worker.request import GenerationRequest

QWEN = "qwen3_5"
NEIGHBOURS = {"a": 3, "b": 40, "c": 17, "d": 64, "e": 9}  # prompt tokens
ANSWER = 24
LONGEST = 64 + ANSWER
GUILTY = prompt(12, 99)


@cache
def lonely(family: str, tokens: tuple[int, ...]) -> list[int]:
    return alone(network(family), tokens, ANSWER)


def prompt_of(id: str) -> tuple[int, ...]:
    return prompt(NEIGHBOURS[id], ord(id))


def beside(run: Run, *, first: int = 3) -> None:
    """Add some neighbours at once and the others later."""
    for id in list(NEIGHBOURS)[:first]:
        run.add(id, prompt_of(id), max_tokens=ANSWER)
        run.step()


def others(run: Run) -> None:
    for id in list(NEIGHBOURS):
        if id not in run.generated:
            run.add(id, prompt_of(id), max_tokens=ANSWER)
            run.step()


def all_is_well(run: Run, family: str = QWEN, *, guilty: str | None = None) -> None:
    """Run to the end. Each row equals its answer alone, the failing one up to its failure."""
    run.drain(max_steps=500)
    tokens = {id: prompt_of(id) if id in NEIGHBOURS else GUILTY for id in run.generated}
    for id, generated in run.generated.items():
        expected = lonely(family, tokens[id])
        assert generated == (expected[: len(generated)] if id == guilty else expected), id
    assert {id for id, ending in run.ended.items() if ending == "faulted"} == ({guilty} - {None})
    assert set(run.ended) == set(run.generated)


class Counting(StepwiseGrammar):
    """Allows everything, and breaks down at one token of the answer."""

    error = None

    def __init__(self, at: int) -> None:
        self._fails_at, self._num_accepted = at, 0

    @property
    def accepted(self) -> int:
        return self._num_accepted

    def accept(self, token: int) -> None:
        self._num_accepted += 1

    def reset(self) -> None:
        self._num_accepted = 0

    def rollback(self, count: int) -> None:
        self._num_accepted -= count

    def bitmask(self) -> bytes | None:
        if self._num_accepted >= self._fails_at:
            raise RuntimeError("no such rule")
        return None


@pytest.mark.parametrize("at", [0, pytest.param(1, marks=pytest.mark.slow), 7])
def test_grammar_that_raises_fails_only_its_row(at: int) -> None:
    run = Run(model(QWEN))
    beside(run)
    run.add("guilty", GUILTY, max_tokens=ANSWER, grammar=Counting(at))
    others(run)
    all_is_well(run, guilty="guilty")
    assert len(run.generated["guilty"]) <= at


@contextmanager
def poisoned(family: str) -> Iterator[int]:
    """Yield a token that no row generates, whose embedding is NaN while the context is open."""
    generated = {token for tokens in [GUILTY, *map(prompt_of, NEIGHBOURS)] for token in lonely(family, tokens)}
    token = next(token for token in range(3, 10) if token not in generated)  # in no prompt either
    layer = network(family).language_model.model if family == QWEN else network(family).model
    weight = layer.embed_tokens.weight
    whole = mx.array(weight)
    weight[token] = float("nan")
    try:
        yield token
    finally:
        layer.embed_tokens.weight = whole


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(0, id="first"),
        pytest.param(5, id="within", marks=pytest.mark.slow),
        pytest.param(11, id="last", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", [QWEN, "gpt_oss", "deepseek_v3", "gemma3", "falcon_h1", "jamba"])
def test_row_with_a_nan_embedding_fails_alone(family: str, place: int) -> None:
    run = Run(model(family))
    beside(run)
    with poisoned(family) as poison:
        run.add("guilty", (*GUILTY[:place], poison, *GUILTY[place + 1 :]), max_tokens=ANSWER)
        others(run)
        all_is_well(run, family, guilty="guilty")
    assert run.generated["guilty"] == []


def test_infinite_logits_fail_their_row() -> None:
    class Mad(Counting):
        def bitmask(self) -> bytes | None:
            return bytes(128) if self._num_accepted == self._fails_at else None  # no token at all

    run = Run(model(QWEN))
    beside(run)
    run.add("guilty", GUILTY, max_tokens=ANSWER, grammar=Mad(5))
    others(run)
    all_is_well(run, guilty="guilty")
    assert len(run.generated["guilty"]) == 5


def raising(whether: Callable[..., bool], call: Callable[..., Any]) -> Callable[..., Any]:
    def raises(*args: Any, **kwargs: Any) -> Any:
        if whether(*args, **kwargs):
            raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error.")
        return call(*args, **kwargs)

    return raises


def once(whether: Callable[..., bool] = lambda *args, **kwargs: True) -> Callable[..., bool]:
    left = [True]

    def fails_once(*args: Any, **kwargs: Any) -> bool:
        return whether(*args, **kwargs) and bool(left) and left.pop()

    return fails_once


@pytest.mark.parametrize("part", ["forward", "collect"], ids=["when it is launched", "when it is waited for"])
@pytest.mark.parametrize("after", [0, pytest.param(1, marks=pytest.mark.slow), 6])
def test_a_step_that_fails_once_costs_no_row_a_token(monkeypatch: pytest.MonkeyPatch, part: str, after: int) -> None:
    run = Run(model(QWEN))
    beside(run)
    others(run)
    run.until(lambda: len(run.generated["e"]) >= after)
    if part == "forward":
        monkeypatch.setattr(rows_module, "forward", raising(once(), rows_module.forward))
    else:
        monkeypatch.setattr(DecodeBatch, "collect", raising(once(), DecodeBatch.collect))
    all_is_well(run)


@pytest.mark.parametrize("after", [0, pytest.param(1, marks=pytest.mark.slow), 6])
def test_row_that_fails_every_step_fails_alone(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    def spoilt(network: Any, cache: Any, rows: list[Row], tokens: mx.array, processors: Any) -> bool:
        return any(row.id == "guilty" and len(row.answer) >= after for row in rows)

    monkeypatch.setattr(rows_module, "forward", raising(spoilt, rows_module.forward))
    run = Run(model(QWEN))
    beside(run)
    run.add("guilty", GUILTY, max_tokens=ANSWER)
    others(run)
    all_is_well(run, guilty="guilty")


def test_two_failing_rows_are_found_in_one_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(network: Any, cache: Any, rows: list[Row], tokens: mx.array, processors: Any) -> bool:
        return any(row.id.startswith("guilty") and row.answer for row in rows)

    monkeypatch.setattr(rows_module, "forward", raising(spoilt, rows_module.forward))
    run = Run(model(QWEN))
    beside(run)
    for id in ("guilty 1", "guilty 2"):
        run.add(id, GUILTY, max_tokens=ANSWER)
    run.until(lambda: set(run.ended) >= {"guilty 1", "guilty 2"})
    assert {run.ended["guilty 1"], run.ended["guilty 2"]} == {"faulted"}
    run.drain()
    assert all(run.generated[id] == lonely(QWEN, prompt_of(id)) for id in ("a", "b", "c"))


def test_rows_preempted_or_cancelled_during_recomputation_emit_no_token_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(model(QWEN), step_s=0.0)
    beside(run)
    others(run)
    run.until(lambda: len(run.generated["e"]) >= 6)
    monkeypatch.setattr(DecodeBatch, "collect", raising(once(), DecodeBatch.collect))
    run.step()
    monkeypatch.undo()
    for id in [id for id in run.active if id != "b"]:
        run.preempt(id)
    run.engine.remove("b")
    del run.generated["b"]
    run.ended.pop("b", None)
    run.readmit()
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
        assert not fails(), "the patched method was not called"


FAMILIES = pytest.mark.parametrize("family", [QWEN, "gemma3"])


@FAMILIES
def test_row_that_cannot_join_fails_alone(family: str) -> None:
    run = Run(model(family))
    run.group_by(ONE_GROUP)
    beside(run)
    run.until(lambda: bool(run.generated["a"]))
    run.until(lambda: not run.engine._prefills)
    run.add("guilty", GUILTY, max_tokens=ANSWER)
    with failing_once("extend"):
        run.until(lambda: "guilty" in run.ended)
    others(run)
    all_is_well(run, family, guilty="guilty")
    assert run.generated["guilty"] == []


@FAMILIES
def test_first_row_that_cannot_begin_a_batch_leaves_the_engine_usable(family: str) -> None:
    run = Run(model(family))
    for i in range(6):
        run.add(f"guilty {i}", GUILTY, max_tokens=ANSWER)
        with failing_once("extend"):
            run.drain()
    assert set(run.ended.values()) == {"faulted"}
    run.add("a", prompt_of("a"), max_tokens=ANSWER)
    assert run.drain()["a"] == lonely(family, prompt_of("a"))


@FAMILIES
@pytest.mark.parametrize("name", ["moved", "filter"])
def test_cache_that_fails_to_remove_a_row_costs_no_row_a_token(family: str, name: str) -> None:
    run = Run(model(family))
    run.group_by(ONE_GROUP)
    run.add("short", prompt(5, 1), max_tokens=4)
    beside(run, first=5)
    with failing_once(name):
        run.until(lambda: "short" in run.ended)
        run.step()
    del run.generated["short"], run.ended["short"]
    all_is_well(run, family)


@FAMILIES
@pytest.mark.parametrize("name", ["moved", "filter"])
def test_cache_that_fails_to_remove_a_cancelled_row_costs_no_row_a_token(family: str, name: str) -> None:
    run = Run(model(family))
    run.group_by(ONE_GROUP)
    run.add("cancelled", prompt(5, 1), max_tokens=ANSWER)
    beside(run, first=5)
    run.until(lambda: bool(run.generated["e"]))
    with failing_once(name):
        run.engine.remove("cancelled")
        run.step()
    del run.generated["cancelled"]
    all_is_well(run, family)


def must_tighten(family: str) -> Run:
    """Return a run with three offline rows that decode, and no memory for another."""
    costs = model(family).costs
    spare = costs.row_bytes(1)  # for one row that is preempted with its cache
    run = Run(model(family), step_s=1.0, memory=costs.peak_bytes([[LONGEST] * 3]) + spare)
    run.group_by(ONE_GROUP)
    for id in ("a", "c", "d"):
        run.add(id, prompt_of(id), max_tokens=ANSWER, lane="batch")
    run.until(lambda: all(run.generated.values()))
    return run


@FAMILIES
def test_failure_to_copy_a_preempted_rows_cache_costs_no_row_a_token(family: str) -> None:
    run = must_tighten(family)
    run.add("b", prompt_of("b"), max_tokens=ANSWER)
    with failing_once("extract"):
        run.step()
    assert not run.ended
    all_is_well(run, family)


@FAMILIES
def test_row_that_cannot_be_restored_with_its_cache_is_recomputed(family: str) -> None:
    run = must_tighten(family)
    run.add("b", prompt_of("b"), max_tokens=6)
    run.step()
    assert run.waiting == ["d"]
    with failing_once("extend"):
        run.until(lambda: not run.waiting)
    run.ended.pop("b", None)
    del run.generated["b"]
    all_is_well(run, family)


@FAMILIES
def test_rows_that_fail_to_move_to_another_group_lose_no_token(family: str) -> None:
    run = Run(model(family))
    run.group_by(ONE_GROUP)
    beside(run, first=5)
    run.until(lambda: all(run.generated.values()))
    run.group_by(EACH_ALONE)
    with failing_once("extend"):
        run.step()
    all_is_well(run, family)


def test_a_prompt_whose_chunk_fails_fails_alone() -> None:
    run = Run(model(QWEN), step_s=0.0)
    beside(run)
    run.add("guilty", prompt(40, 99), max_tokens=ANSWER)
    with pytest.MonkeyPatch.context() as patch:
        whole = type(network(QWEN)).__call__

        def large(self: Any, tokens: mx.array, cache: Any) -> bool:
            return tokens.shape[1] > 1

        run.until(lambda: "guilty" in (prefills := run.engine._prefills) and len(prefills) == 1)
        patch.setattr(type(network(QWEN)), "__call__", raising(once(large), whole))
        run.until(lambda: "guilty" in run.ended)
    others(run)
    all_is_well(run, guilty="guilty")


def test_row_that_cannot_be_created_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(model(QWEN))
    beside(run, first=1)
    run.until(lambda: bool(run.generated["a"]))
    run.add("guilty", GUILTY, max_tokens=ANSWER)
    run.add("b", prompt_of("b"), max_tokens=ANSWER)
    monkeypatch.setattr(prefill_module, "make_prompt_cache", raising(once(), prefill_module.make_prompt_cache))
    others(run)
    all_is_well(run, guilty="guilty")


def always(*args: Any, **how: Any) -> bool:
    return True


def test_ten_failures_in_a_row_break_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "forward", raising(always, rows_module.forward))
    run = Run(model(QWEN))
    for i in range(20):
        run.add(str(i), GUILTY, max_tokens=4)
    with pytest.raises(EngineBroken):
        run.drain()


def test_ten_failed_prompts_in_a_row_break_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(model(QWEN))
    monkeypatch.setattr(type(network(QWEN)), "__call__", raising(always, type(network(QWEN)).__call__))
    for i in range(20):
        run.add(str(i), GUILTY, max_tokens=4)
    with pytest.raises(EngineBroken):
        run.drain()


def test_ten_failed_steps_in_a_row_break_the_engine_before_any_row_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillQueue, "plan", raising(always, PrefillQueue.plan))
    run = Run(model(QWEN))
    run.add("a", GUILTY, max_tokens=4)
    with pytest.raises(EngineBroken):
        run.drain()
    assert run.steps == 10


def test_failures_with_tokens_in_between_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(model(QWEN))
    for i in range(11):  # ten in a row break the engine
        run.add(f"guilty {i}", GUILTY, max_tokens=4, grammar=Counting(0))
        run.add(f"good {i}", prompt_of("a"), max_tokens=ANSWER)
        run.drain()
        assert run.generated[f"good {i}"] == lonely(QWEN, prompt_of("a"))
        assert run.ended[f"guilty {i}"] == "faulted"


async def test_broken_engine_reports_failure_to_end_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, died, outcomes = write_checkpoint(CONFIGS["llama"], tmp_path), asyncio.Event(), list[Outcome]()

    engine = EngineThread(lambda: open_model(str(checkpoint)), EngineOptions(0.1), on_failure=died.set)
    await engine.start()
    monkeypatch.setattr(rows_module, "forward", raising(always, rows_module.forward))
    for i in range(20):
        engine.submit(GenerationRequest(str(i), GUILTY, 5), lambda outcome, rows: outcomes.append(outcome))
    await asyncio.wait_for(died.wait(), 20)
    await engine.stop()
    assert EngineBroken in {record.exc_info[0] for record in caplog.records if record.exc_info}
    # Those that were not found guilty by then are in the queue's hands again.
    assert not any(isinstance(outcome, Sampled) for outcome in outcomes)


def test_exceptions_of_every_type_are_caught_only_by_isolate_by_the_thread_and_where_a_models_files_are_read() -> None:
    def is_broad(name: ast.AST | None) -> bool:
        return isinstance(name, ast.Name) and name.id in ("Exception", "BaseException")

    def catches_all(node: ast.AST) -> bool:
        """Return True for such a handler that does not raise again, and for such an end of a context."""
        match node:
            case ast.ExceptHandler(type=kind):
                raises = any(isinstance(each, ast.Raise) and each.exc is None for each in ast.walk(node))
                return (kind is None or is_broad(kind)) and not raises
            case ast.FunctionDef(name="__exit__", body=body):
                return any(is_broad(each) for statement in body for each in ast.walk(statement))
        return False

    folder = Path(isolation.__file__).parent
    found = Counter(
        str(file.relative_to(folder))
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if catches_all(node)
    )
    assert found == {"isolation.py": 1, "thread.py": 1, "checkpoint.py": 1}
