"""An image that the vision encoder fails on fails its own row and no other."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.driver import Run
from tests.engine.vision import cases
from tests.engine.vision.cases import image_request, prompt
from worker.engine.vision.feature_cache import Features

FAMILIES = "qwen3_5", "gemma3", "pixtral"
BAD, GOOD = (1, 24, 16), (2, 32, 16)

Encode = Callable[[Any, list[mx.array]], Features]


class Failing:
    """An encoder that fails on one of the images, `times` times."""

    def __init__(self, encode: Encode, bad: Any, fail: Callable[[Features], Features], times: int) -> None:
        self._encode, self._bad, self._fail, self._left = encode, bad, fail, times

    def __call__(self, what: Any, passed: list[mx.array]) -> Features:
        features = self._encode(what, passed)
        if what is not self._bad or self._left == 0:
            return features
        self._left -= 1
        return self._fail(features)


def raises(features: Features) -> Features:
    raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error.")


def has_no_memory(features: Features) -> Features:
    raise RuntimeError("[metal::malloc] Unable to allocate 1000000000 bytes.")


def no_numbers(features: Features) -> Features:
    return Features(features.rows * float("nan"), features.deepstack)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fail", [raises, no_numbers])
def test_image_that_fails_to_encode_fails_only_its_row_and_is_encoded_again(
    family: str, fail: Callable[[Features], Features], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {
        "text": prompt(family, 9, seed=1),
        "other image": prompt(family, 5, GOOD, 4, seed=2),
        "bad": prompt(family, 5, GOOD, 3, BAD, 4, seed=3),
    }
    expected = {id: cases.alone(family, each, 12) for id, each in prompts.items()}
    vision = cases.model(family).vision
    assert vision is not None
    bad = prompts["bad"].images[1].pixel_inputs
    monkeypatch.setattr(vision.family, "encode", Failing(vision.family.encode, bad, fail, times=1))
    run = Run(cases.model(family), prefix_bytes=1 << 24)
    for id, each in prompts.items():
        run.submit(image_request(family, id, each, 12))
    run.drain()
    assert run.ended.pop("bad") == "faulted"
    run.submit(image_request(family, "again", prompts["bad"], 12))
    run.drain()
    assert run.generated == {**expected, "bad": [], "again": expected["bad"]}


def test_image_for_which_the_device_had_no_memory_once_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[0]
    prompts = {"text": prompt(family, 9, seed=1), "image": prompt(family, 5, GOOD, 3, BAD, 4, seed=3)}
    vision = cases.model(family).vision
    assert vision is not None
    bad = prompts["image"].images[1].pixel_inputs
    monkeypatch.setattr(vision.family, "encode", Failing(vision.family.encode, bad, has_no_memory, times=1))
    run = Run(cases.model(family), prefix_bytes=1 << 24)
    for id, each in prompts.items():
        run.submit(image_request(family, id, each, 12))
    run.drain()
    assert run.generated == {id: cases.alone(family, each, 12) for id, each in prompts.items()}
