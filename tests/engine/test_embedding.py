"""Embedding models: each input's vector is what mlx-embeddings makes of it alone, whoever else is in the batch."""

import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_embeddings import generate, load

from tests.support.embedding import FAMILIES, VOCAB, write_checkpoint
from tests.support.stack import TINY_CHAT
from worker.engine import upstream
from worker.engine.checkpoint import embeds
from worker.engine.embedding import EmbeddingCosts, EmbeddingEngine, EmbeddingModel, open_embedding_model
from worker.engine.isolation import EngineBroken
from worker.errors import CannotStart
from worker.outcomes import Embedded, Outcome, RowFailed
from worker.request import EmbeddingInputs

MEMORY = 2_000_000_000


def opened(folder: Path, **given: Any) -> EmbeddingModel:
    return open_embedding_model(str(folder), **{"memory": MEMORY, "context": None, "trusted": False, **given})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: write_checkpoint(family, tmp_path_factory.mktemp("embedding") / family))


def tokens(length: int, seed: int) -> tuple[int, ...]:
    dice = random.Random(f"{length} {seed}")
    return tuple(dice.randrange(10, VOCAB) for _ in range(length))


def job(id: str, *lengths: int, lane: Any = "interactive", tenant: str = "") -> EmbeddingInputs:
    return EmbeddingInputs(id, tuple(tokens(length, at) for at, length in enumerate(lengths)), lane, tenant)


def run(engine: EmbeddingEngine) -> list[list[Outcome]]:
    """Return the outcomes of each step."""
    steps = []
    while engine.needs_step:
        steps.append([*engine.step().outcomes])
    return steps


def vectors(steps: list[list[Outcome]]) -> dict[tuple[str, int], bytes]:
    return {(each.id, each.index): each.vector for step in steps for each in step if isinstance(each, Embedded)}


def order(steps: list[list[Outcome]]) -> list[set[str]]:
    return [{each.id for each in step} for step in steps]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_has_the_vectors_of_the_library_s_calls_for_single_texts(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    model, (network, tokenizer) = opened(folder_of(family)), load(str(folder_of(family)))
    texts = ["Hello there!", "a", "Hello there?", "The cat sat on the mat. " * 4, "日本 🚀", "Hello there!", "b"]
    engine = EmbeddingEngine(model, MEMORY)
    for at, text in enumerate(texts):
        engine.add(EmbeddingInputs(str(at), (tuple(model.tokenizer.encode(text)),), "interactive"))
    found = vectors(run(engine))
    for at, text in enumerate(texts):
        alone = generate(network, tokenizer, text).text_embeds
        assert found[str(at), 0] == memoryview(alone.astype(mx.float32)).tobytes(), text
    assert len({*found.values()}) == 6  # one text comes twice


@pytest.mark.parametrize(("dtype", "bits"), [(mx.bfloat16, None), (mx.float16, None), (mx.bfloat16, 4)])
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_in_half_precision_and_quantized_a_batch_has_the_library_s_vectors_too(
    family: str, dtype: mx.Dtype, bits: int | None, tmp_path: Path
) -> None:
    folder = write_checkpoint(family, tmp_path, dtype=dtype, bits=bits)
    model, (network, tokenizer) = opened(folder), load(str(folder))
    texts = ["Hello there!", "Hello, you!", "Hello there?", "a"]
    engine = EmbeddingEngine(model, MEMORY)
    engine.add(EmbeddingInputs("a", tuple(tuple(model.tokenizer.encode(text)) for text in texts), "interactive"))
    alone = [generate(network, tokenizer, text).text_embeds.astype(mx.float32) for text in texts]
    assert vectors(run(engine)) == {("a", at): memoryview(each).tobytes() for at, each in enumerate(alone)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_in_a_full_batch_has_the_vector_that_it_has_alone(family: str, folder_of: Callable[[str], Path]) -> None:
    model = opened(folder_of(family))
    engine, lengths = EmbeddingEngine(model, MEMORY), [1, 2, 7, 33, 130] * 5
    engine.add(job("a", *lengths))
    engine.add(job("b", *reversed(lengths)))
    together = vectors(run(engine))
    for (id, index), vector in together.items():
        single = EmbeddingEngine(model, MEMORY)
        given = job("a", *lengths) if id == "a" else job("b", *reversed(lengths))
        single.add(EmbeddingInputs("single", (given.tokens[index],), "interactive"))
        assert vectors(run(single)) == {("single", 0): vector}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_context_is_the_number_of_positions_that_inputs_have(family: str, folder_of: Callable[[str], Path]) -> None:
    model = opened(folder_of(family))
    assert (model.context, model.dimensions, model.vocab) == (130, 64, VOCAB)
    assert opened(folder_of(family), context=50).context == 50


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_takes_no_more_memory_than_is_predicted(family: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 1200}
    model = opened(write_checkpoint(family, tmp_path, **wide))
    for rows, length in ((1, 1000), (16, 64), (3, 300)):
        inputs = mx.array([tokens(length, row) for row in range(rows)])
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(model.network(inputs).text_embeds)
        assert mx.get_peak_memory() - before <= model.costs.forward_bytes(rows, length), (rows, length)


def test_the_longest_row_that_fits_is_the_longest_for_which_a_forward_is_predicted_to_fit() -> None:
    costs = EmbeddingCosts(1_000, 700, 4)
    for memory in (1_000, 2_000, 50_000, 10_000_000):
        longest = costs.longest(memory)
        assert costs.forward_bytes(1, longest) <= memory - 1_000 < costs.forward_bytes(1, longest + 1)


def test_inputs_that_no_memory_is_left_for_shorten_the_context(folder_of: Callable[[str], Path]) -> None:
    model = opened(folder_of("bert"))
    memory = model.costs.weights_bytes + model.costs.forward_bytes(1, 70)
    assert opened(folder_of("bert"), memory=memory).context == 70
    with pytest.raises(CannotStart, match="Its weights take"):
        opened(folder_of("bert"), memory=model.costs.weights_bytes)


@pytest.fixture
def engine(folder_of: Callable[[str], Path]) -> EmbeddingEngine:
    return EmbeddingEngine(opened(folder_of("bert")), MEMORY)


def test_interactive_jobs_come_before_offline_ones_and_share_no_batch_with_them(engine: EmbeddingEngine) -> None:
    engine.add(job("offline", 5, 5, 9, lane="batch"))
    engine.add(job("one", 5, 7))
    engine.add(job("two", 5))
    assert order(run(engine)) == [{"one"}, {"two", "one"}, {"offline"}, {"offline"}]


def test_tenants_take_turns_and_a_tenant_s_jobs_too(engine: EmbeddingEngine) -> None:
    engine.add(job("many", *range(10, 20), tenant="a"))
    engine.step()
    engine.add(job("later", 50, 51, tenant="a"))
    engine.add(job("other", 30, tenant="b"))
    assert order(run(engine))[:4] == [{"other"}, {"later"}, {"many"}, {"later"}]


def test_a_batch_is_filled_with_inputs_of_the_same_length_alone(engine: EmbeddingEngine) -> None:
    engine.add(job("a", 8, 9))
    engine.add(job("b", 9, 9, 8))
    assert [len(step) for step in run(engine)] == [3, 2]


def test_a_batch_has_at_most_4096_tokens(engine: EmbeddingEngine) -> None:
    engine.add(job("a", *[100] * 100))
    assert [len(step) for step in run(engine)] == [40, 40, 20]


def test_a_removed_job_is_not_computed(engine: EmbeddingEngine) -> None:
    engine.add(job("a", 8))
    engine.add(job("b", 9))
    engine.remove("b")
    engine.remove("unknown")
    assert order(run(engine)) == [{"a"}]


def test_a_row_that_fails_ends_its_job_alone(engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    network = engine._network

    def failing(inputs: mx.array) -> Any:
        if (inputs == 7).any():
            raise RuntimeError("no memory")
        return network(inputs)

    monkeypatch.setattr(engine, "_network", failing)
    engine.add(EmbeddingInputs("bad", ((10, 11), (7, 7), (10,)), "interactive"))
    engine.add(job("good", 2))
    outcomes = [each for step in run(engine) for each in step]
    assert RowFailed("bad") in outcomes
    assert [each.id for each in outcomes if isinstance(each, Embedded)].count("good") == 1
    monkeypatch.setattr(engine, "_network", lambda inputs: failing(mx.full(inputs.shape, 7)))
    for number in range(10):
        engine.add(job(str(number), 3 + number))
    with pytest.raises(EngineBroken):
        run(engine)


def test_a_vector_that_is_not_finite_fails_its_job(engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    network = engine._network

    def overflowing(inputs: mx.array) -> Any:
        found = network(inputs)
        found.text_embeds = mx.where((inputs == 7).any(axis=1, keepdims=True), mx.nan, found.text_embeds)
        return found

    monkeypatch.setattr(engine, "_network", overflowing)
    engine.add(EmbeddingInputs("bad", ((7, 7),), "interactive"))
    engine.add(job("good", 2))
    (step,) = run(engine)
    assert [type(each) for each in step] == [RowFailed, Embedded]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_embedding_model_is_recognized(family: str, folder_of: Callable[[str], Path]) -> None:
    assert embeds(folder_of(family), "given")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Qwen3-4B", False), ("mlx-community/Qwen3-Embedding-4B-4bit", True), ("./embedders/qwen3/", False)],
)
def test_a_qwen3_without_a_sign_in_its_files_is_told_by_its_name(name: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert embeds(tmp_path, name) == expected


def test_a_chat_model_is_none_and_an_unknown_embedding_model_is_refused_by_its_type(tmp_path: Path) -> None:
    assert not embeds(TINY_CHAT, str(TINY_CHAT))
    with pytest.raises(CannotStart, match=r"^empty: there is no config\.json"):
        embeds(tmp_path, "empty")
    (tmp_path / "config.json").write_text('{"model_type": "nomic_bert"}')
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(CannotStart, match="nomic_bert"):
        embeds(tmp_path, "a")


def test_a_model_that_the_library_cannot_load_is_refused_with_its_reason(tmp_path: Path) -> None:
    folder = write_checkpoint("bert", tmp_path)
    (folder / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 2}')
    with pytest.raises(CannotStart, match="mlx-embeddings cannot load"):
        opened(folder)


def test_without_the_extra_a_start_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "worker.engine.upstream.mlx_embeddings", raising=False)
    monkeypatch.delattr(upstream, "mlx_embeddings", raising=False)
    monkeypatch.setitem(sys.modules, "mlx_embeddings.utils", None)
    folder = write_checkpoint("llama_bidirec", tmp_path)
    with pytest.raises(CannotStart, match=r"needs the package mlx_embeddings.*\[worker,embeddings\]"):
        opened(folder)


def test_a_model_whose_own_pooling_is_another_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint("bert", tmp_path)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    opened(folder)
    assert "1_Pooling/config.json" in caplog.text
