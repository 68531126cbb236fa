"""Prompts with images, of which a draft drops text. The oracle is mlx-vlm: it embeds the whole prompt with its images,
and then computes only the kept tokens, each at its position in the whole."""

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_vlm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from models.tiny_vision import CONFIGS, EOS, write_tokenizer
from tests.engine import tiny
from tests.engine.driver import Run
from tests.engine.vision import cases
from tests.engine.vision.cases import Prompt, prompt
from tests.selection import examples
from worker.engine.model.load import DraftModel, Model
from worker.engine.prefill.scoring import LOOKAHEAD, why_not_sparse, with_draft
from worker.engine.vision.feature_cache import Encode, EncoderRun
from worker.errors import CannotStart
from worker.request import GenerationRequest, PromptImage, Range, SpecPrefillParams, tokens_in

FAMILIES = pytest.mark.parametrize("family", [*CONFIGS])
ANSWER = 12
PARTS = 60, (1, 32, 24), 70, (2, 24, 16), 90  # tokens, and images by seed, width and height
Logits = tuple[mx.array, Callable[[int, int], mx.array]]
EVERYWHERE = SpecPrefillParams(
    keep=0.3, droppable_ranges=((10, 1000),), min_tokens=1, requested=True
)  # over the images, too


@cache
def drafted(family: str) -> Model:
    """A draft that knows nothing but bytes: no token of an image, and hardly a template's."""
    return replace(cases.model(family), draft=DraftModel(tiny.network("llama"), context=1000))


@cache
def long(family: str, seed: int = 1) -> Prompt:
    return prompt(family, *PARTS, seed=seed)


def image_request(family: str, id: str = "thin", each: Prompt | None = None, **more: Any) -> GenerationRequest:
    return cases.image_request(family, id, each or long(family), ANSWER, **{"specprefill": EVERYWHERE, **more})


def spans(family: str) -> list[Range]:
    return [prompt_image.span for prompt_image in image_request(family).images]


def some_kept(family: str) -> tuple[Range, ...]:
    """Return both images, some of the text, and all tokens within a window of the tiny models."""
    (one, one_end), (two, two_end) = spans(family)
    tokens = len(long(family).tokens)
    behind = (one_end + 20, one_end + 31), (two - 4, two_end + 9), (tokens - 30, tokens)
    return (0, 12), (20, 31), (one - 1, one_end + 1), *behind


def kept_logits_with_images(family: str, each: Prompt, kept: Sequences[Range]) -> Logits:
    """Return the logits after the tokens in these ranges, and a function from each next token, and its number in the
    answer, to those after it."""
    network = cases.model(family).vision.network  # type: ignore[union-attr]
    tokens, (pixels, how) = mx.array([each.tokens]), cases.as_one_prompt(each.images)
    given = network.get_input_embeddings(tokens, pixels, mask=mx.ones_like(tokens), **how)
    if "image_grid_thw" in how:
        return _placed_by_ids(network.language_model, tokens, given, how["image_grid_thw"], kept)
    shown = tokens == cases.model(family).vision.family.placeholder  # type: ignore[union-attr]
    return _hidden(network.language_model, tokens, given, shown, kept)


def kept_by_mlx_vlm(family: str, each: Prompt, kept: Sequences[Range]) -> list[int]:
    """Return the greedy answer to the kept tokens, up to the end of the sequence, computed once for each case."""
    key = family, each.key, tuple(kept)
    if key not in _ANSWERS:
        _ANSWERS[key] = _kept_by_mlx_vlm(family, each, kept)
    return [*_ANSWERS[key]]


_ANSWERS: dict[object, list[int]] = {}


def _kept_by_mlx_vlm(family: str, each: Prompt, kept: Sequences[Range]) -> list[int]:
    logits, next_ = kept_logits_with_images(family, each, kept)
    generated = list[int]()
    while (token := int(logits[0, -1].argmax())) != EOS and len(generated) < ANSWER:
        generated.append(token)
        logits = next_(token, len(generated) - 1)
    return generated


def _placed_by_ids(language: Any, tokens: mx.array, given: Any, grid: mx.array, kept: Sequences[Range]) -> Logits:
    """In one forward. These take positions as they are told."""
    positions, shift = language.get_rope_index(tokens, grid)
    at, cache = mx.array([place for span in kept for place in range(*span)]), make_prompt_cache(language)
    deep = given.deepstack_visual_embeds
    how = {} if deep is None else {"deepstack_visual_embeds": deep, "visual_pos_masks": given.visual_pos_masks[:, at]}
    first = language(
        tokens[:, at], inputs_embeds=given.inputs_embeds[:, at], cache=cache, position_ids=positions[:, :, at], **how
    )
    begin = tokens.shape[1] + int(shift)

    def next_(token: int, number: int) -> mx.array:
        place = mx.full((3, 1, 1), begin + number)
        logits: mx.array = language(mx.array([[token]]), cache=cache, position_ids=place).logits
        return logits

    return first.logits, next_


def _hidden(language: Any, tokens: mx.array, given: Any, shown: mx.array, kept: Sequences[Range]) -> Logits:
    """In one forward of all tokens, each of which so has its place, while nobody sees those that are left out."""
    cache: list[Any] = [_Hiding(kept, layer) for layer in make_prompt_cache(language)]
    how = {"per_layer_inputs": given.per_layer_inputs, "mm_token_type_ids": shown.astype(mx.int32)}
    logits = language(tokens, inputs_embeds=given.inputs_embeds, cache=cache, **how).logits

    def next_(token: int, number: int) -> mx.array:
        logits: mx.array = language(mx.array([[token]]), cache=cache).logits
        return logits

    return logits, next_


class _Hiding(KVCache):
    """Cache of all tokens, with a mask over the dropped ones; a window counts the kept ones."""

    def __init__(self, kept: Sequences[Range], layer: Any) -> None:
        super().__init__()
        self._kept, self._window = kept, layer.max_size if isinstance(layer, RotatingKVCache) else None

    def make_mask(self, tokens: int, **_: Any) -> mx.array:
        end = self.offset + tokens
        kept, place = mx.ones(end, mx.bool_), mx.arange(end)
        for (_, behind), (start, _) in pairwise([(0, 0), *self._kept]):
            kept[behind:start] = False
        number, here = mx.cumsum(kept.astype(mx.int32)), place[self.offset :, None]
        visible = kept & (place <= here)
        if self._window:
            visible = visible & (number > number[self.offset :, None] - self._window)
        return visible | (place == here)  # a token that attends to none would yield NaN


@FAMILIES
def test_oracle_with_all_tokens_equals_mlx_vlm(family: str) -> None:
    whole = long(family)
    assert kept_by_mlx_vlm(family, whole, [(0, len(whole.tokens))]) == cases.alone(family, whole, ANSWER)


@FAMILIES
@pytest.mark.parametrize("step_s", [0.02, 1e-6], ids=["at once", "in chunks"])
def test_kept_tokens_give_mlx_vlms_answer(family: str, step_s: float) -> None:
    kept = some_kept(family)
    run = Run(cases.model(family), step_s=step_s)
    run.submit(image_request(family, kept_ranges=kept))
    run.drain()
    assert run.generated["thin"] == kept_by_mlx_vlm(family, long(family), kept)
    assert run.generated["thin"] != cases.alone(family, long(family), ANSWER), (
        "a model to which what is left out is nothing"
    )


@FAMILIES
@pytest.mark.parametrize("step_s", [0.02, 1e-6], ids=["at once", "in chunks"])
def test_row_with_images_and_dropped_tokens_equals_its_kept_tokens_alone(family: str, step_s: float) -> None:
    others = {"text": prompt(family, 30, seed=2), "seeing": prompt(family, 5, (3, 24, 24), 9, seed=3)}
    run = Run(drafted(family), step_s=step_s, prefix_bytes=1 << 24)
    run.submit(cases.image_request(family, "text", others["text"], 30))
    run.until(lambda: len(run.generated["text"]) > 2)
    run.submit(image_request(family))
    run.submit(image_request(family, "other", long(family, 2)))
    run.submit(cases.image_request(family, "seeing", others["seeing"], 30))
    run.drain()
    for id, seed in ("thin", 1), ("other", 2):
        assert run.generated[id] == kept_by_mlx_vlm(family, long(family, seed), run.kept_ranges[id])
        assert tokens_in(run.kept_ranges[id]) < len(long(family, seed).tokens) * 0.75
    for id, each in others.items():
        assert run.generated[id] == cases.alone(family, each, 30)


@st.composite
def some_ranges(draw: st.DrawFn) -> tuple[Range, ...]:
    edges = sorted(draw(st.sets(st.integers(0, 230), min_size=2, max_size=8)))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


@FAMILIES
@settings(max_examples=examples(5), deadline=None)
@given(thinnable=some_ranges(), keep=st.sampled_from([0.1, 0.5]), step_s=st.sampled_from([0.02, 1e-6]))
@example(thinnable=((0, 1000),), keep=0.1, step_s=0.02)
def test_images_and_the_tokens_around_them_are_always_kept(
    family: str, thinnable: tuple[Range, ...], keep: float, step_s: float
) -> None:
    run = Run(drafted(family), step_s=step_s)
    run.submit(image_request(family, specprefill=SpecPrefillParams(keep, thinnable, min_tokens=1, requested=True)))
    run.drain()
    kept = run.kept_ranges.get("thin", ((0, len(long(family).tokens)),))
    assert run.generated["thin"] == kept_by_mlx_vlm(family, long(family), kept)
    for first, end in spans(family):
        assert any(start < first and end < behind for start, behind in kept)


def test_chunk_counts_its_computed_tokens() -> None:
    family, chunks = "gemma4 with experts", list[int]()
    run = Run(drafted(family), step_s=1e-6)
    run.submit(image_request(family))
    run.until(lambda: "thin" in run.kept_ranges)
    while not run.generated["thin"]:
        run.step()
        chunks.append(run.engine._now.longest_chunk)
    assert sum(chunks) == tokens_in(run.kept_ranges["thin"]) - 1


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list that receives the digests of the images that are encoded."""
    digests = list[bytes]()

    def noted(prompt_image: PromptImage, encode: Encode) -> EncoderRun:
        digests.append(prompt_image.digest)
        return EncoderRun(prompt_image, encode)

    monkeypatch.setattr("worker.engine.prefill.load.EncoderRun", noted)
    return digests


def forget_features(run: Run) -> None:
    assert run.engine._caches.features is not None
    run.engine._caches.features._entries.clear()


@FAMILIES
def test_cached_prefix_changes_nothing_and_its_images_are_not_encoded(family: str, encoded: list[bytes]) -> None:
    whole, (one, _) = long(family), spans(family)
    head = Prompt(whole.tokens[: one[1] + 5], whole.images[:1])
    run = Run(drafted(family), prefix_bytes=1 << 24)
    run.submit(cases.image_request(family, "head", head, 1))
    run.drain()
    forget_features(run)
    run.submit(image_request(family))
    run.drain()
    assert encoded == [processed.digest for processed in whole.images]
    assert run.cached["thin"] >= len(head.tokens) - 1
    assert run.generated["thin"] == kept_by_mlx_vlm(family, whole, run.kept_ranges["thin"])


@FAMILIES
def test_dense_prefix_with_images_is_cached_and_nothing_else(family: str) -> None:
    start = spans(family)[1][0] - 1
    run = Run(drafted(family), prefix_bytes=1 << 24)
    run.submit(
        image_request(family, specprefill=replace(EVERYWHERE, droppable_ranges=((start, 1000),)), boundaries=(start,))
    )
    run.drain()
    run.submit(cases.image_request(family, "whole", long(family), ANSWER))
    run.drain()
    assert run.cached["whole"] == start if drafted(family).stateful else run.kept_ranges["thin"][0][1]
    assert run.generated["whole"] == cases.alone(family, long(family), ANSWER)


@FAMILIES
def test_rows_that_differ_in_an_image_alone_are_scored_once_and_do_not_mix(family: str) -> None:
    red, blue = (prompt(family, 60, (seed, 32, 24), 90, seed=1) for seed in (1, 2))
    assert red.tokens == blue.tokens
    run = Run(drafted(family), prefix_bytes=1 << 24)
    for id, each in ("red", red), ("blue", blue):
        run.submit(image_request(family, id, each))
        run.drain()
        assert run.generated[id] == kept_by_mlx_vlm(family, each, run.kept_ranges[id])
    assert run.generated["red"] != run.generated["blue"]
    assert run.scored["blue"] == 0


@FAMILIES
@pytest.mark.parametrize("keep", [True, False], ids=["with its cache", "without it"])
def test_preempted_row_with_dropped_tokens_continues(family: str, keep: bool) -> None:
    run = Run(drafted(family), prefix_bytes=1 << 24)
    run.submit(image_request(family))
    run.until(lambda: len(run.generated["thin"]) > 3)
    run.preempt("thin")
    run.readmit(keep_caches=keep)
    run.drain()
    assert run.generated["thin"] == kept_by_mlx_vlm(family, long(family), run.kept_ranges["thin"])


@FAMILIES
def test_new_attempt_drops_the_same_tokens_and_resumes_after_the_delivered_ones(family: str) -> None:
    expected = kept_by_mlx_vlm(family, long(family), some_kept(family))
    for delivered in 0, 5:
        run = Run(cases.model(family), prefix_bytes=1 << 24)
        run.submit(image_request(family, kept_ranges=some_kept(family), resume_tokens=tuple(expected[:delivered])))
        assert run.drain() == {"thin": expected}


@FAMILIES
def test_attempt_with_images_in_the_prefix_cache_does_not_encode_them(family: str, encoded: list[bytes]) -> None:
    tokens = len(long(family).tokens)
    kept = (0, tokens - 40), (tokens - 30, tokens)
    run = Run(cases.model(family), prefix_bytes=1 << 24)
    run.submit(cases.image_request(family, "whole", long(family), 1, boundaries=(tokens - 40,)))
    run.drain()
    forget_features(run)
    run.submit(image_request(family, kept_ranges=kept))
    run.drain()
    assert run.cached["thin"] == tokens - 40
    assert run.generated["thin"] == kept_by_mlx_vlm(family, long(family), kept)
    assert len(encoded) == 2


@FAMILIES
def test_rows_of_a_failed_step_are_recomputed(family: str) -> None:
    run = Run(drafted(family))
    run.submit(image_request(family))
    run.submit(cases.image_request(family, "text", prompt(family, 30, seed=2), 30))
    run.until(lambda: len(run.generated["thin"]) > 3)
    run.engine._running.clear()
    run.drain()
    assert run.generated["thin"] == kept_by_mlx_vlm(family, long(family), run.kept_ranges["thin"])
    assert run.generated["text"] == cases.alone(family, prompt(family, 30, seed=2), 30)


@pytest.mark.parametrize("where", ["scoring._pooled", "spans.rope_at"])
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_any_failure_computes_the_whole_prompt(family: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(f"worker.engine.prefill.{where}", fails)
    run = Run(drafted(family), prefix_bytes=1 << 24)
    run.submit(image_request(family))
    run.drain()
    assert run.generated["thin"] == cases.alone(family, long(family), ANSWER)
    assert list(run.skipped) == ["thin"]


def test_prompt_without_droppable_text_is_not_scored() -> None:
    run = Run(drafted("qwen3_5"))
    run.submit(image_request("qwen3_5", specprefill=replace(EVERYWHERE, droppable_ranges=tuple(spans("qwen3_5")))))
    run.drain()
    tokens = len(long("qwen3_5").tokens)
    assert run.skipped == {"thin": f"None of the {tokens} tokens left to compute may be dropped."}
    assert (run.scored["thin"], run.generated["thin"]) == (0, cases.alone("qwen3_5", long("qwen3_5"), ANSWER))


@FAMILIES
def test_vision_model_supports_sparse_prefill_if_its_text_model_does(family: str) -> None:
    assert why_not_sparse(cases.model(family).network, 2048) is None


@pytest.mark.parametrize(("less", "sparse"), [(0, True), (1, False)])
def test_draft_reads_only_text_so_images_may_exceed_its_context(less: int, sparse: bool) -> None:
    images = sum(end - start for start, end in spans("qwen3_5"))
    context = len(long("qwen3_5").tokens) - images + LOOKAHEAD - less
    run = Run(replace(drafted("qwen3_5"), draft=DraftModel(tiny.network("llama"), context)))
    run.submit(image_request("qwen3_5"))
    run.drain()
    assert ("thin" in run.kept_ranges) is sparse


@pytest.mark.parametrize(("other", "why_not"), [("<image_soft_token>", None), ("<end_of_image>", "Token 267 is")])
def test_draft_needs_every_token_but_the_placeholder(other: str, why_not: str | None, tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tiny.FAMILIES["llama"], tmp_path)
    write_tokenizer(folder, "")
    for name in "tokenizer.json", "tokenizer_config.json":
        (folder / name).write_text((folder / name).read_text().replace(other, "<another>"))
    if why_not is None:
        assert with_draft(cases.model("gemma3"), str(folder)).draft is not None
    else:
        with pytest.raises(CannotStart, match=why_not):
            with_draft(cases.model("gemma3"), str(folder))
