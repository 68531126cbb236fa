"""Images go through the vision encoder layer by layer, each once, while other rows decode."""

from collections import OrderedDict
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tiny_vision import CONFIGS, EOS
from tests.engine.driver import Run
from tests.engine.vision import cases
from tests.engine.vision.cases import Prompt, image_request, prompt
from worker.engine.batch.groups import Groups
from worker.engine.batch.row import Row
from worker.engine.options import EngineOptions
from worker.engine.prefill.caches import EngineCaches
from worker.engine.prefill.queue import PrefillQueue
from worker.engine.step.cost import PromptChunk
from worker.engine.vision.feature_cache import EncoderRun, FeatureCache, Features
from worker.outcomes import PromptProgress, Sampled
from worker.request import PromptImage, Sampling

FAMILIES = [*CONFIGS]
ANY_SIZE = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "pixtral", "mistral3"]  # their images can be large
LARGE = (4, 64, 56)
LAYERS = 2


def features(width: int, deep: int = 0) -> Features:
    """Return features of 4 × width bytes, and as many for each DeepStack layer."""
    return Features(mx.zeros((1, width)), (mx.zeros((1, width)),) * deep)


# A cache of features

images = st.tuples(st.sampled_from(["", "a"]), st.integers(0, 5).map(lambda number: bytes([number])))
uses = st.lists(
    st.tuples(st.just("find"), images)
    | st.tuples(st.just("keep"), images)
    | st.tuples(st.just("room"), st.integers(-50, 250)),
    max_size=40,
)


@given(st.integers(0, 200), uses)
def test_the_features_used_last_are_kept_as_far_as_there_is_room(max_steps: int, uses: list[tuple[str, Any]]) -> None:
    cache, model, room = FeatureCache(max_steps), OrderedDict[tuple[str, bytes], Features](), max_steps
    for use, what in uses:
        match use:
            case "find":
                assert cache.get(*what) is model.get(what)
                if what in model:
                    model.move_to_end(what)
            case "keep":
                new = features(what[1][0] * 4)
                cache.put(*what, new)
                if new.nbytes <= room:
                    model.setdefault(what, new)
            case "room":
                cache.set_limit(what)
                room = max(0, min(max_steps, what))
        while sum(each.nbytes for each in model.values()) > room:
            model.popitem(last=False)
        assert cache.nbytes == sum(each.nbytes for each in model.values()) <= max_steps
    assert all(cache.get(*what) is each for what, each in model.items())


def test_deepstack_features_are_counted_too() -> None:
    cache = FeatureCache(1000)
    cache.put("", b"1", features(10, deep=3))
    assert cache.nbytes == 4 * 40


# An image on its way


def passing(layers: int) -> Any:
    """Return the `encode` of an encoder with this number of layers."""

    def encode(pixel_inputs: Any, passed: list[mx.array]) -> Features:
        rows = mx.ones((4, 4))
        for _ in range(layers):
            rows = rows + 1
            passed.append(rows)
        return Features(rows * 2)

    return encode


@given(st.integers(1, 300), st.integers(1, 40), st.lists(st.integers(1, 100), min_size=1, max_size=50))
def test_advance_computes_at_most_its_tokens_or_one_layer(tokens: int, layers: int, asks: list[int]) -> None:
    encoding = EncoderRun(PromptImage(b"1", (0, tokens), {}), passing(layers))
    computed, layer = 0, -(-tokens // (layers + 1))
    for max_steps in (*asks, *[tokens] * (layers + 2)):
        before = encoding.remaining
        if encoding.features is None:
            done = encoding.advance(max_steps)
            assert done == before - encoding.remaining
            assert done <= max(max_steps, layer)
            computed += done
        assert (encoding.features is None) == (encoding.remaining > 0)
    assert encoding.features is not None
    assert mx.array_equal(encoding.features.rows, mx.full((4, 4), 2 * (1 + layers)))
    assert (computed, encoding.remaining) == (tokens, 0)


# In the engine


def counted(family: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that receives the inputs of each encoded image."""
    vision, looked = cases.model(family).vision, list[Any]()
    assert vision is not None
    encode = vision.family.encode

    def looking(what: Any, passed: list[mx.array]) -> Features:
        looked.append(what)
        return encode(what, passed)

    monkeypatch.setattr(vision.family, "encode", looking)
    return looked


@pytest.mark.parametrize("family", ANY_SIZE)
def test_others_decode_between_two_layers_of_an_image(family: str) -> None:
    run = Run(cases.model(family), step_s=1e-6)
    endless = Sampling(logit_bias=((EOS, -100.0),))
    run.submit(image_request(family, "text", prompt(family, 5, seed=1), 200, sampling=endless))
    run.until(lambda: len(run.generated["text"]) > 0)
    run.submit(image_request(family, "picture", prompt(family, 3, LARGE, 4, seed=2), 4))
    parts = decoded = 0
    while not run.generated["picture"]:
        outcomes = run.step().outcomes
        looked = sum(isinstance(outcome, PromptProgress) and outcome.phase == "encoding" for outcome in outcomes)
        decoded += sum(isinstance(outcome, Sampled) and outcome.id == "text" for outcome in outcomes)
        parts += looked
        assert looked <= 1
        assert decoded >= parts
    assert parts == LAYERS + 1, "one progress report per layer, and one for the features"


@pytest.mark.parametrize("family", ANY_SIZE)
def test_image_tokens_are_measured_separately_from_text(family: str) -> None:
    run = Run(cases.model(family))
    prefills = run.engine._prefills
    text, image = prefills.cost("prefill").token_s, prefills.cost("encoding").token_s
    run.submit(image_request(family, "picture", prompt(family, 3, LARGE, 4, seed=2), 1))
    run.until(lambda: run.encoded["picture"] > 0)
    assert prefills.cost("encoding").token_s != image
    assert prefills.cost("prefill").token_s == text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step_s", [1e-6, 1.0], ids=["a layer a step", "at once"])
def test_two_rows_with_the_same_image_encode_it_once(
    family: str, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = counted(family, monkeypatch)
    prompts = {str(seed): prompt(family, 7, LARGE, seed, seed=seed) for seed in (2, 3)}
    run = Run(cases.model(family), step_s=step_s, prefix_bytes=1 << 24)
    for id, each in prompts.items():
        run.submit(image_request(family, id, each, 12))
    assert run.drain() == {id: cases.alone(family, each, 12) for id, each in prompts.items()}
    assert len(looked) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_costs_nothing_in_the_next_turn_nor_in_another_conversation(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = counted(family, monkeypatch)
    run, first = Run(cases.model(family), prefix_bytes=1 << 24), prompt(family, 20, LARGE, 9, seed=1)
    run.submit(image_request(family, "first", first, 12))
    run.drain()
    outcomes = [token for token in run.generated["first"] if token < 256]  # some generate the placeholder, too
    next_turn = Prompt((*first.tokens, *outcomes, *prompt(family, 6, seed=5).tokens), first.images)
    for id, each in ("next turn", next_turn), ("another", prompt(family, 4, LARGE, 5, seed=8)):
        run.submit(image_request(family, id, each, 12))
        run.drain()
        assert run.generated[id] == cases.alone(family, each, 12)
    assert len(looked) == 1


def test_features_are_not_found_from_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = counted("qwen3_5", monkeypatch)
    run = Run(cases.model("qwen3_5"), prefix_bytes=1 << 24)
    for id, space in ("a", "a"), ("b", "b"), ("a again", "a"):
        run.submit(image_request("qwen3_5", id, prompt("qwen3_5", 4, LARGE, 5, seed=len(id)), 4, namespace=space))
        run.drain()
    assert len(looked) == 2
    assert [run.encoded[id] > 0 for id in ("a", "b", "a again")] == [True, True, False]


@pytest.mark.parametrize("family", FAMILIES)
def test_image_of_a_cancelled_row_is_encoded_for_the_next(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = counted(family, monkeypatch)
    run = Run(cases.model(family), step_s=1e-6, prefix_bytes=1 << 24)
    prompts = {id: prompt(family, 7, LARGE, 4, seed=at) for at, id in enumerate(("gone", "stays"))}
    for id, each in prompts.items():
        run.submit(image_request(family, id, each, 12))
    run.step()
    run.engine.remove("gone")
    run.drain()
    assert run.generated["stays"] == cases.alone(family, prompts["stays"], 12)
    assert len(looked) <= 2
    assert run.engine._prefills.images("stays").total == 0


def with_an_image(caches: EngineCaches, *ids: str) -> PrefillQueue:
    """Return the queue with prompts of these ids that have the same image."""
    queue = PrefillQueue(cases.model("qwen3_5"), EngineOptions(1.0), caches)
    for id in ids:
        queue.add(Row.of(image_request("qwen3_5", id, prompt("qwen3_5", 7, LARGE, 4, seed=len(id)), 4)))
    queue.begin_step(0.0)
    return queue


def planned(queue: PrefillQueue) -> list[PromptChunk]:
    forwards = queue.plan(Groups(cases.model("qwen3_5").network, lambda groups: True), 0.0, 10**9)
    return [chunk for forward in forwards for chunk in forward.chunks]


def test_image_that_one_prompt_has_encoded_is_missing_in_no_other() -> None:
    queue = with_an_image(EngineCaches(cases.model("qwen3_5"), 1 << 24), "a", "bb")
    assert queue.images("bb").largest > 0
    while queue.images("a").largest:
        queue.advance(PromptChunk("a", 10**6))
    assert queue.images("bb").largest == 0


def test_plan_is_made_from_the_images_that_were_missing_when_the_step_began() -> None:
    caches = EngineCaches(cases.model("qwen3_5"), 1 << 24)
    queue, other = with_an_image(caches, "a"), with_an_image(caches, "bb")
    before = planned(queue)
    assert [chunk.id for chunk in before] == ["a"]
    while other.images("bb").largest:
        other.advance(PromptChunk("bb", 10**6))
    assert planned(queue) == before
    queue.begin_step(0.0)
    assert planned(queue) != before
