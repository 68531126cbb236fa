"""Rows with images in a batch with rows of text: each equals its answer alone."""

from pathlib import Path
from typing import Any

import pytest

from models.tiny_vision import CONFIGS, EOS, write_checkpoint
from tests.engine.driver import Run, answers, tokens
from tests.engine.vision import cases
from tests.engine.vision.cases import Prompt, prompt
from worker.engine.model.load import open_model
from worker.engine.prefill import task as prefill_module
from worker.engine.prefix import tree as tree_module

FAMILIES = [*CONFIGS]
# Their experts do not matter for the cache of a row.
OTHER_ROWS = [family for family in FAMILIES if not family.endswith("_moe")]
LONG = 24


def mixed(family: str) -> dict[str, Prompt]:
    return {
        "text": prompt(family, 23, seed=1),
        "one": prompt(family, 5, (1, 24, 16), 9, seed=2),
        "two": prompt(family, 4, (2, 32, 16), 6, (3, 16, 16), 11, seed=3),
        "long text": prompt(family, 70, seed=4),
        "large": prompt(family, 3, (4, 64, 56), 4, seed=5),
        "two alike": prompt(family, 2, (1, 24, 16), 2, (1, 24, 16), 30, seed=6),
    }


def generated(family: str, prompts: dict[str, Prompt], **how: Any) -> dict[str, list[int]]:
    outcomes = answers(
        cases.model(family), [cases.image_request(family, id, each, LONG) for id, each in prompts.items()], **how
    )
    return {id: tokens(each) for id, each in outcomes.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_and_without_images_equal_mlx_vlms_answers_alone(family: str) -> None:
    prompts = mixed(family)
    expected = {id: cases.alone(family, each, LONG) for id, each in prompts.items()}
    assert generated(family, prompts) == expected
    assert len({tuple(each) for each in expected.values()}) == len(expected), "the model answers all prompts alike"
    assert generated(family, prompts, steps_apart=3) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_cut_images_and_text_anywhere(family: str) -> None:
    prompts = mixed(family)
    run = Run(cases.model(family), step_s=1e-6)
    for id, each in prompts.items():
        run.submit(cases.image_request(family, id, each, LONG))
        run.step()
    assert run.drain() == {id: cases.alone(family, each, LONG) for id, each in prompts.items()}
    assert run.chunks["long text"] >= 4
    assert len(prompts["large"].tokens) < 40 or run.chunks["large"] >= 4


@pytest.mark.parametrize("family", OTHER_ROWS)
def test_checkpoint_position_may_lie_within_an_image(family: str) -> None:
    each, run = mixed(family)["two"], Run(cases.model(family), prefix_bytes=1 << 24)
    expected = {id: cases.alone(family, each, LONG) for id in ("first", "second")}
    within = tuple(prompt_image.span[0] + 2 for prompt_image in cases.image_request(family, "", each, LONG).images)
    for id in expected:
        run.submit(cases.image_request(family, id, each, LONG, boundaries=within))
        run.drain()
    assert run.generated == expected


def test_prefix_that_ends_in_a_bidirectional_image_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in prefill_module, tree_module:
        monkeypatch.setattr(module, "MAX_SEGMENT_TOKENS", 8)
    family, each = "gemma4 with experts", prompt("gemma4 with experts", 3, (1, 32, 32), 9)
    # Layers with a window have a snapshot only at the end of a row.
    folder = write_checkpoint(family, tmp_path, seed=1, text={"layer_types": ["full_attention"] * 4})
    run = Run(model := open_model(str(folder)), prefix_bytes=1 << 24)
    for id in "first", "second":
        run.submit(image_request := cases.image_request(family, id, each, LONG))
        run.drain()
        assert run.generated[id] == cases.alone(family, each, LONG, by=model)
        run.engine._caches.prefix._tree.shrink(run.engine._caches.prefix._tree.nbytes // 4)  # type: ignore[union-attr]
    start, end = image_request.images[0].span
    assert start < run.cached["second"] < end


@pytest.mark.parametrize("family", OTHER_ROWS)
def test_two_rows_that_differ_only_in_the_image_do_not_mix(family: str) -> None:
    red, blue = (prompt(family, 40, (seed, 32, 32), 40) for seed in (1, 2))
    assert red.tokens == blue.tokens
    expected = {"red": cases.alone(family, red, LONG), "blue": cases.alone(family, blue, LONG)}
    assert expected["red"] != expected["blue"]
    before = cases.image_request(family, "", red, LONG).images[0].span[0]
    run = Run(cases.model(family), prefix_bytes=1 << 24)
    for round in range(2):
        for id, each in ("red", red), ("blue", blue):
            run.submit(cases.image_request(family, f"{id} {round}", each, LONG, boundaries=(before,)))
            run.drain()
            assert run.generated[f"{id} {round}"] == expected[id]
    assert run.cached["red 0"] == 0
    assert run.cached["blue 0"] == before, "only the text before the image"
    assert run.cached["red 1"] == run.cached["blue 1"] == len(red.tokens) - 1


@pytest.mark.parametrize("family", OTHER_ROWS)
@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "together"])
def test_prompts_that_part_at_or_after_an_image_are_found_there(family: str, together: bool) -> None:
    run, expected, before = Run(cases.model(family), prefix_bytes=1 << 24), dict[str, list[int]](), 0
    for seed in 1, 2:
        begun = prompt(family, 40, (seed, 32, 32), 30)
        for tail in range(3):
            id, end = f"{seed} {tail}", prompt(family, 20, seed=10 + tail)
            whole = Prompt((*begun.tokens, *end.tokens), begun.images)
            expected[id] = cases.alone(family, whole, LONG)
            run.submit(request := cases.image_request(family, id, whole, LONG))
            before = request.images[0].span[0]
            if not together:
                run.drain()
    run.drain()
    assert run.generated == expected
    found = [min(run.cached[f"{seed} {tail}"], len(begun.tokens)) for seed in (1, 2) for tail in range(3)]
    if together:
        assert sorted(found)[2:] == [len(begun.tokens)] * 4
    else:
        assert found[2] == found[5] == len(begun.tokens)
        assert found[4] >= before


@pytest.mark.parametrize("family", OTHER_ROWS)
def test_known_image_is_not_encoded_again(family: str) -> None:
    first, second = (prompt(family, 7, (1, 32, 32), 9, seed=seed) for seed in (1, 2))
    run = Run(cases.model(family), prefix_bytes=1 << 24)
    for id, each in ("first", first), ("second", second):
        run.submit(cases.image_request(family, id, each, LONG))
        run.drain()
        assert run.generated[id] == cases.alone(family, each, LONG)
    assert run.encoded["first"] > 0
    assert run.encoded["second"] == run.cached["second"] == 0


@pytest.mark.parametrize("family", OTHER_ROWS)
def test_conversation_continues_with_text_and_with_another_image(family: str) -> None:
    run = Run(cases.model(family), prefix_bytes=1 << 24)
    begun = prompt(family, 20, (1, 32, 24), 20)
    run.submit(cases.image_request(family, "begun", begun, LONG))
    run.drain()
    answered = (*begun.tokens, *run.generated["begun"], *([EOS] if run.ended["begun"] == "stop" else []))
    text, prompt_image = prompt(family, 15, seed=8), prompt(family, 6, (2, 24, 40), 5, seed=9)
    for id, turn in ("text", text), ("picture", prompt_image):
        whole = Prompt((*answered, *turn.tokens), (*begun.images, *turn.images))
        run.submit(cases.image_request(family, id, whole, LONG))
        run.drain()
        assert run.generated[id] == cases.alone(family, whole, LONG)
        assert run.cached[id] >= len(answered) - 1
    assert run.encoded["text"] == 0
    assert run.encoded["picture"] > 0


@pytest.mark.parametrize("family", OTHER_ROWS)
@pytest.mark.parametrize("keep", [True, False], ids=["with its cache", "without it"])
def test_preempted_row_with_images_continues(family: str, keep: bool) -> None:
    prompts = {id: mixed(family)[id] for id in ("text", "two")}
    run = Run(cases.model(family))
    for id, each in prompts.items():
        run.submit(cases.image_request(family, id, each, LONG, lane="batch"))
    run.until(lambda: len(run.generated.get("two", [])) == 7)
    run.preempt("two")
    run.step()
    run.readmit(keep_caches=keep)
    assert run.drain() == {id: cases.alone(family, each, LONG) for id, each in prompts.items()}


@pytest.mark.parametrize("family", OTHER_ROWS)
def test_new_attempt_resumes_after_the_delivered_tokens(family: str) -> None:
    each = mixed(family)["two"]
    expected = cases.alone(family, each, LONG)
    run = Run(cases.model(family))
    run.submit(cases.image_request(family, "two", each, LONG, resume_tokens=tuple(expected[:9])))
    assert run.drain() == {"two": expected}


@pytest.mark.parametrize("family", FAMILIES)
def test_placeholder_in_an_answer_is_no_image(family: str) -> None:
    each, sign = mixed(family)["two"], cases.image_processor(family)._placeholder
    expected = cases.alone(family, each, LONG, first=sign)
    assert expected[0] == sign
    run = Run(cases.model(family))
    run.submit(cases.image_request(family, "two", each, LONG, resume_tokens=tuple(expected[:3])))
    assert run.drain() == {"two": expected}


@pytest.mark.parametrize("family", OTHER_ROWS)
def test_rows_of_a_failed_step_are_recomputed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {id: mixed(family)[id] for id in ("text", "one", "two")}
    run = Run(cases.model(family))
    for id, each in prompts.items():
        run.submit(cases.image_request(family, id, each, LONG))
    run.until(lambda: len(run.generated.get("two", [])) == 5)
    run.engine._running.clear()
    assert run.drain() == {id: cases.alone(family, each, LONG) for id, each in prompts.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_with_a_placeholder_is_recomputed_unchanged(family: str) -> None:
    vision, each, generated = cases.model(family).vision, mixed(family)["one"], list[list[int]]()
    assert vision is not None
    for prefix_bytes in 0, 1 << 24:  # the image's tokens as well as those of the answer
        run = Run(cases.model(family), prefix_bytes=prefix_bytes)
        run.submit(cases.image_request(family, "before", each, 1))
        run.drain()
        run.submit(cases.image_request(family, "again", each, LONG, resume_tokens=(7, vision.family.placeholder, 9)))
        generated.append(run.drain()["again"])
        assert (run.cached["again"] > 0) == (prefix_bytes > 0)
    assert generated[0] == generated[1]
