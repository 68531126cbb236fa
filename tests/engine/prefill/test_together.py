"""Prompts that share forwards while the engine runs. Each equals its answer alone, whatever happens to another."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.engine.driver import Run
from tests.engine.packing import pack_everything
from tests.engine.prefill.test_specprefill import LONG, WISH, drafted, kept_alone
from tests.engine.tiny import FAMILIES, alone, model, network, prompt
from tests.engine.vision import cases
from tests.engine.vision.test_rows import FAMILIES as IMAGE_FAMILIES
from worker.engine.cache import slots
from worker.engine.cache.pack import Pack
from worker.engine.step.cost import Forward

QWEN = "qwen3_5"
BAD = 5  # a token that no prompt contains
ANSWER = 12
LENGTHS = {"a": 3, "b": 40, "c": 17, "d": 64, "e": 9, "f": 33, "g": 1, "h": 17}  # prompt tokens


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Forward]:
    return pack_everything(monkeypatch)


def rows_of(planned: list[Forward]) -> int:
    """Return the rows of the largest forward."""
    return max(len(forward.chunks) for forward in planned)


def assert_all_equal_alone(run: Run, family: str) -> None:
    for id, generated in run.drain().items():
        if run.ended[id] != "faulted":
            assert generated == alone(network(family), prompt(LENGTHS[id], ord(id)), ANSWER), id


@pytest.mark.parametrize("prefix_bytes", [0, 10**9])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_share_forwards_equal_those_alone(family: str, prefix_bytes: int, planned: list[Forward]) -> None:
    run = Run(model(family), prefix_bytes=prefix_bytes)
    for number, (id, length) in enumerate(LENGTHS.items()):
        run.add(id, prompt(length, ord(id)), max_tokens=ANSWER, boundaries=(length // 2,))
        if number > 3:
            run.step()
    assert_all_equal_alone(run, family)
    assert rows_of(planned) >= 3


def add_all(run: Run, *ids: str, **more: Any) -> None:
    for id in ids or LENGTHS:
        run.add(id, prompt(LENGTHS[id], ord(id)), max_tokens=ANSWER, **more)


def assert_only_bad_fails(run: Run, family: str = QWEN) -> None:
    run.drain()
    assert {id for id, ending in run.ended.items() if ending == "faulted"} == {"bad"}
    for id in run.generated.keys() - {"bad"}:
        assert run.generated[id] == alone(network(family), prompt(LENGTHS[id], ord(id)), ANSWER), id


def bad_prompt(at: int) -> tuple[int, ...]:
    tokens = prompt(30, 99)
    return *tokens[:at], BAD, *tokens[at + 1 :]


def on_embedding(patch: pytest.MonkeyPatch, replace: Callable[[mx.array, mx.array], mx.array]) -> None:
    """Replace the embeddings of each call: `replace(tokens, embeddings)`."""
    embed = nn.Embedding.__call__
    patch.setattr(nn.Embedding, "__call__", lambda layer, tokens: replace(tokens, embed(layer, tokens)))


@pytest.mark.parametrize("at", [0, 20])
def test_prompt_that_raises_fails_alone(at: int, planned: list[Forward], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tokens: mx.array, embeddings: mx.array) -> mx.array:
        if tokens.shape[-1] > 1 and (tokens == BAD).any().item():
            raise RuntimeError("This token fails on purpose.")
        return embeddings

    run = Run(model(QWEN))
    on_embedding(monkeypatch, refuse)
    add_all(run, "b", "d")
    run.add("bad", bad_prompt(at), max_tokens=ANSWER)
    add_all(run, "f", "h")
    assert_only_bad_fails(run)
    assert rows_of(planned) == 5


@pytest.mark.parametrize("family", [QWEN, "gpt_oss", "deepseek_v3", "qwen3_moe", "falcon_h1"])
def test_prompt_with_a_nan_embedding_fails_alone(
    family: str, planned: list[Forward], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(model(family))
    on_embedding(monkeypatch, lambda tokens, embeddings: mx.where((tokens == BAD)[..., None], mx.nan, embeddings))
    add_all(run, "b", "d")
    run.add("bad", bad_prompt(3), max_tokens=ANSWER)
    add_all(run, "f", "h")
    assert_only_bad_fails(run, family)
    assert rows_of(planned) == 5


def test_forward_that_fails_once_costs_no_prompt_its_answer(
    planned: list[Forward], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, calls = Pack.compute, Counter[str]()

    def fail_once(pack: Pack) -> None:
        calls["compute"] += 1
        if calls["compute"] == 2:
            raise MemoryError
        compute(pack)

    monkeypatch.setattr(Pack, "compute", fail_once)
    run = Run(model(QWEN))
    add_all(run)
    assert_all_equal_alone(run, QWEN)
    assert "faulted" not in run.ended.values()
    assert calls["compute"] == 2, "prompts of a failed forward share none again"


def test_prompt_whose_cache_cannot_take_its_chunk_fails_alone(
    planned: list[Forward], monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack = Pack.unpack

    def fail(pack: Pack, index: int) -> None:
        if index == 1:
            monkeypatch.setattr(Pack, "unpack", unpack)
            raise ValueError
        unpack(pack, index)

    monkeypatch.setattr(Pack, "unpack", fail)
    run = Run(model(QWEN))
    add_all(run, "b", "d", "f")
    assert_all_equal_alone(run, QWEN)
    assert [id for id, ending in run.ended.items() if ending == "faulted"] == ["d"]


def test_rows_that_cannot_join_together_join_one_by_one(
    planned: list[Forward], monkeypatch: pytest.MonkeyPatch
) -> None:
    join_all, joined = slots.join_all, list[int]()

    def refuse_several(batch: Sequence[Any], rows: Sequence[slots.RowCache]) -> None:
        joined.append(len(rows))
        if len(rows) > 1:
            raise ValueError
        join_all(batch, rows)

    monkeypatch.setattr(slots, "join_all", refuse_several)
    run = Run(model(QWEN))
    for id in "abc":
        run.add(id, prompt(17, ord(id)), max_tokens=ANSWER)
    for id, generated in run.drain().items():
        assert generated == alone(network(QWEN), prompt(17, ord(id)), ANSWER)
    assert joined == [3, 1, 1, 1]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", QWEN, "deepseek_v32"])
def test_prompts_share_forwards_beside_scored_and_sparse_ones(family: str, planned: list[Forward]) -> None:
    run = Run(drafted(family))
    run.add("scored", prompt(LONG, 1), max_tokens=ANSWER, specprefill=WISH)
    run.add("sparse", prompt(LONG, 2), max_tokens=ANSWER, kept_ranges=((0, 40), (150, LONG)))
    add_all(run)
    run.drain()
    for id in LENGTHS:
        assert run.generated[id] == alone(network(family), prompt(LENGTHS[id], ord(id)), ANSWER), id
    expected = kept_alone(family, run.kept_ranges["scored"])
    assert run.generated["scored"][: len(expected)] == expected
    sparse = {chunk.id for forward in planned if len(forward.chunks) > 1 for chunk in forward.chunks} - {*LENGTHS}
    assert sparse == set()
    assert rows_of(planned) > 3


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_prompts_share_forwards_beside_images_and_after_them(family: str, planned: list[Forward]) -> None:
    image = 1, 24, 16
    prompts = {
        "text": cases.prompt(family, 120, seed=1),
        "one": cases.prompt(family, 5, image, 60, seed=2),
        "other": cases.prompt(family, 9, image, 50, seed=3),
        "last": cases.prompt(family, 40, image, 9, seed=4),
    }
    run = Run(cases.model(family))
    for id, each in prompts.items():
        run.submit(cases.image_request(family, id, each, ANSWER))
    run.drain()
    assert run.generated == {id: cases.alone(family, each, ANSWER) for id, each in prompts.items()}
    shared = [{chunk.id for chunk in forward.chunks} for forward in planned]
    assert any({"one", "other"} <= ids for ids in shared)
    assert any({"text", "one"} <= ids for ids in shared)


def test_of_prompts_that_begin_alike_only_the_first_is_computed_before_it_is_cached(planned: list[Forward]) -> None:
    system = prompt(90, 1)
    run = Run(model("qwen3"), prefix_bytes=10**9)
    for seed in range(4):
        run.add(str(seed), (*system, *prompt(10 + seed, 2 + seed)), max_tokens=ANSWER)
    run.add("other", prompt(100, 7), max_tokens=ANSWER)
    run.step()
    shared = [{chunk.id for chunk in forward.chunks} for forward in planned if len(forward.chunks) > 1]
    assert shared == [{"0", "other"}]
    run.drain()
    for seed in range(4):
        expected = alone(network("qwen3"), (*system, *prompt(10 + seed, 2 + seed)), ANSWER)
        assert run.generated[str(seed)] == expected
