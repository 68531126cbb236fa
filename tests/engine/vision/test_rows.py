"""Rows with images beside rows of text: each says what it says alone."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Run, answers, tokens
from tests.engine.vision import seen
from tests.engine.vision.checkpoints import CONFIGS, EOS, write_checkpoint
from tests.engine.vision.seen import Prompt, prompt
from worker.engine.model.load import open_model
from worker.engine.prefill import base as prefill_module
from worker.schedule import prefix as tree_module

FAMILIES = [*CONFIGS]
# Whose experts make no difference to what is kept of a row.
OTHERS = [family for family in FAMILIES if not family.endswith("_moe")]
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


def said(family: str, prompts: dict[str, Prompt], **how: Any) -> dict[str, list[int]]:
    heard = answers(seen.model(family), [seen.asked(family, id, each, LONG) for id, each in prompts.items()], **how)
    return {id: tokens(each) for id, each in heard.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_one_two_and_no_images_say_together_what_mlx_vlm_says_to_each_alone(family: str) -> None:
    prompts = mixed(family)
    expected = {id: seen.alone(family, each, LONG) for id, each in prompts.items()}
    assert said(family, prompts) == expected
    assert len({tuple(each) for each in expected.values()}) == len(expected), "a model that says the same to all"
    assert said(family, prompts, apart=3) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_cut_images_and_text_anywhere(family: str) -> None:
    prompts = mixed(family)
    run = Run(seen.model(family), step_s=1e-6)
    for id, each in prompts.items():
        run.submit(seen.asked(family, id, each, LONG))
        run.step()
    assert run.drain() == {id: seen.alone(family, each, LONG) for id, each in prompts.items()}
    assert run.chunks["long text"] >= 4
    assert len(prompts["large"].tokens) < 40 or run.chunks["large"] >= 4


@pytest.mark.parametrize("family", OTHERS)
def test_a_place_to_keep_a_prefix_at_may_lie_within_an_image(family: str) -> None:
    each, run = mixed(family)["two"], Run(seen.model(family), prefix_bytes=1 << 24)
    expected = {id: seen.alone(family, each, LONG) for id in ("first", "second")}
    within = tuple(picture.span[0] + 2 for picture in seen.asked(family, "", each, LONG).images)
    for id in expected:
        run.submit(seen.asked(family, id, each, LONG, boundaries=within))
        run.drain()
    assert run.said == expected


def test_an_image_whose_tokens_see_one_another_goes_on_where_a_prefix_ends_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in prefill_module, tree_module:
        monkeypatch.setattr(module, "MAX_SEGMENT_TOKENS", 8)
    family, each = "gemma4 with experts", prompt("gemma4 with experts", 3, (1, 32, 32), 9)
    # Of layers with a window nothing is kept but at a row's end.
    folder = write_checkpoint(family, tmp_path, seed=1, text={"layer_types": ["full_attention"] * 4})
    run = Run(model := open_model(str(folder)), prefix_bytes=1 << 24)
    for id in "first", "second":
        run.submit(asked := seen.asked(family, id, each, LONG))
        run.drain()
        assert run.said[id] == seen.alone(family, each, LONG, by=model)
        run.engine._caches.prefix._tree.shrink(run.engine._caches.prefix._tree.nbytes // 4)  # type: ignore[union-attr]
    start, end = asked.images[0].span
    assert start < run.cached["second"] < end


@pytest.mark.parametrize("family", OTHERS)
def test_two_rows_that_differ_only_in_the_image_do_not_mix(family: str) -> None:
    red, blue = (prompt(family, 40, (seed, 32, 32), 40) for seed in (1, 2))
    assert red.tokens == blue.tokens
    expected = {"red": seen.alone(family, red, LONG), "blue": seen.alone(family, blue, LONG)}
    assert expected["red"] != expected["blue"]
    before = seen.asked(family, "", red, LONG).images[0].span[0]
    run = Run(seen.model(family), prefix_bytes=1 << 24)
    for round in range(2):
        for id, each in ("red", red), ("blue", blue):
            run.submit(seen.asked(family, f"{id} {round}", each, LONG, boundaries=(before,)))
            run.drain()
            assert run.said[f"{id} {round}"] == expected[id]
    assert run.cached["red 0"] == 0
    assert run.cached["blue 0"] == before, "the text before the image, and no more"
    assert run.cached["red 1"] == run.cached["blue 1"] == len(red.tokens) - 1


@pytest.mark.parametrize("family", OTHERS)
def test_an_image_that_was_seen_is_not_encoded_again(family: str) -> None:
    first, second = (prompt(family, 7, (1, 32, 32), 9, seed=seed) for seed in (1, 2))
    run = Run(seen.model(family), prefix_bytes=1 << 24)
    for id, each in ("first", first), ("second", second):
        run.submit(seen.asked(family, id, each, LONG))
        run.drain()
        assert run.said[id] == seen.alone(family, each, LONG)
    assert run.encoded["first"] > 0
    assert run.encoded["second"] == run.cached["second"] == 0


@pytest.mark.parametrize("family", OTHERS)
def test_a_conversation_goes_on_with_text_and_with_another_image(family: str) -> None:
    run = Run(seen.model(family), prefix_bytes=1 << 24)
    begun = prompt(family, 20, (1, 32, 24), 20)
    run.submit(seen.asked(family, "begun", begun, LONG))
    run.drain()
    answered = (*begun.tokens, *run.said["begun"], *([EOS] if run.ended["begun"] == "stop" else []))
    text, picture = prompt(family, 15, seed=8), prompt(family, 6, (2, 24, 40), 5, seed=9)
    for id, turn in ("text", text), ("picture", picture):
        whole = Prompt((*answered, *turn.tokens), (*begun.sights, *turn.sights))
        run.submit(seen.asked(family, id, whole, LONG))
        run.drain()
        assert run.said[id] == seen.alone(family, whole, LONG)
        assert run.cached[id] >= len(answered) - 1
    assert run.encoded["text"] == 0
    assert run.encoded["picture"] > 0


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("keep", [True, False], ids=["with its cache", "without it"])
def test_a_row_that_was_parked_goes_on_where_it_was(family: str, keep: bool) -> None:
    prompts = {id: mixed(family)[id] for id in ("text", "two")}
    run = Run(seen.model(family))
    for id, each in prompts.items():
        run.submit(seen.asked(family, id, each, LONG, lane="batch"))
    run.until(lambda: len(run.said.get("two", [])) == 7)
    run.park("two")
    run.step()
    run.stir(keep=keep)
    assert run.drain() == {id: seen.alone(family, each, LONG) for id, each in prompts.items()}


@pytest.mark.parametrize("family", OTHERS)
def test_a_new_attempt_goes_on_after_what_was_delivered(family: str) -> None:
    each = mixed(family)["two"]
    expected = seen.alone(family, each, LONG)
    run = Run(seen.model(family))
    run.submit(seen.asked(family, "two", each, LONG, resume_tokens=tuple(expected[:9])))
    assert run.drain() == {"two": expected}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_s_own_sign_for_an_image_in_its_answer_is_no_image(family: str) -> None:
    each, sign = mixed(family)["two"], seen.eyes(family)._placeholder
    expected = seen.alone(family, each, LONG, first=sign)
    assert expected[0] == sign
    run = Run(seen.model(family))
    run.submit(seen.asked(family, "two", each, LONG, resume_tokens=tuple(expected[:3])))
    assert run.drain() == {"two": expected}


@pytest.mark.parametrize("family", OTHERS)
def test_rows_whose_step_failed_are_computed_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {id: mixed(family)[id] for id in ("text", "one", "two")}
    run = Run(seen.model(family))
    for id, each in prompts.items():
        run.submit(seen.asked(family, id, each, LONG))
    run.until(lambda: len(run.said.get("two", [])) == 5)
    run.engine._running.clear()
    assert run.drain() == {id: seen.alone(family, each, LONG) for id, each in prompts.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_with_the_sign_for_an_image_in_it_is_computed_again_as_it_was(family: str) -> None:
    vision, each, said = seen.model(family).vision, mixed(family)["one"], list[list[int]]()
    assert vision is not None
    for prefix_bytes in 0, 1 << 24:  # the image's tokens beside those of the answer, and before them
        run = Run(seen.model(family), prefix_bytes=prefix_bytes)
        run.submit(seen.asked(family, "before", each, 1))
        run.drain()
        run.submit(seen.asked(family, "again", each, LONG, resume_tokens=(7, vision.family.placeholder, 9)))
        said.append(run.drain()["again"])
        assert (run.cached["again"] > 0) == (prefix_bytes > 0)
    assert said[0] == said[1]
