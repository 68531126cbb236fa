"""What images need in memory is known before they are looked at: those that do not fit wait, or are told why."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.driver import ONE_GROUP, Run
from tests.engine.vision import seen
from tests.engine.vision.checkpoints import CONFIGS, write_checkpoint
from worker.engine.model.load import Model, open_model
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.vision.encoder import EncoderRun
from worker.engine.vision.load import Vision, open_vision
from worker.engine.vision.memory_profile import with_encoder_cost
from worker.engine.vision.processors import ProcessedImage
from worker.schedule.memory import CHUNK, ImageDemand, MemoryModel
from worker.schedule.request import GenerationRequest, PromptImage

FAMILIES = [*CONFIGS]
TINY = 200_000  # bytes: arrays of a fixed size show beside images that need no more


def roomy(family: str, folder: Path, side: int) -> Path:
    """A checkpoint that takes images of so many pixels a side as they are, where its family has images of any size."""
    write_checkpoint(family, folder)
    if family.startswith("qwen"):
        # The older ones read the first two, the newer ones the last.
        sizes = {"min_pixels": 64, "max_pixels": side**2, "size": {"shortest_edge": 64, "longest_edge": side**2}}
        _change(folder / "preprocessor_config.json", sizes)
    if family in ("pixtral", "mistral3"):
        _change(folder / "preprocessor_config.json", {"size": {"longest_edge": side}})
        _change(folder / "config.json", {"vision_config": {"image_size": side}})
    return folder


def _change(file: Path, values: dict[str, Any]) -> None:
    """Parts keep what is not named."""
    said = json.loads(file.read_text())
    parts = {name: {**said.get(name, {}), **value} for name, value in values.items() if isinstance(value, dict)}
    file.write_text(json.dumps({**said, **values, **parts}))


def needed(vision: Vision, sight: ProcessedImage) -> int:
    """Bytes, while the image is looked at as the engine does it."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    encoding = EncoderRun(PromptImage(sight.digest, (0, sight.tokens), sight.pixel_inputs), vision.family.encode)
    while encoding.features is None:
        encoding.advance(1)
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_needs_about_what_was_predicted(family: str, tmp_path: Path) -> None:
    _, _, vision = open_vision(roomy(family, tmp_path, side=128), trusted=False)
    mx.eval(vision.network.parameters())
    gc.collect()  # what other tests have left would go while it is measured
    tower = with_encoder_cost(MemoryModel(0), vision, sides=(48, 80)).encoder
    for width, height in (48, 32), (80, 80), (96, 64), (128, 112):
        sight = vision.image_processor.preprocess(seen.image(1, width, height), b"")
        predicted, measured = tower.bytes_for(ImageDemand(sight.tokens)), needed(vision, sight)
        assert 0.7 * predicted - TINY < measured < 1.3 * predicted + TINY, (width, height)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_tells_what_it_takes_as_it_was_prepared(family: str) -> None:
    (picture,) = seen.asked(family, "", seen.prompt(family, 3, (1, 64, 56), 4), 1).images
    arrays = [each for each in picture.pixel_inputs.values() if isinstance(each, np.ndarray)]
    assert 0.99 < picture.nbytes / sum(array.nbytes for array in arrays) <= 1


LARGE = 96  # pixels a side


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(roomy("qwen3_vl", tmp_path_factory.mktemp("large") / "model", side=LARGE)))


@pytest.fixture
def large(opened: Model) -> Model:
    return in_memory(opened)


def in_memory(model: Model) -> Model:
    """What other tests have left there counts as its weights."""
    gc.collect()
    mx.clear_cache()
    return replace(model, costs=replace(model.costs, weights_bytes=mx.get_active_memory()))


def shown(model: Model, id: str, *seeds: int, max_tokens: int = 8) -> GenerationRequest:
    """A prompt with as many images."""
    assert model.vision is not None
    eyes, encode = model.vision.image_processor, MLXTokenizer(model.tokenizer).encode
    sights = [eyes.preprocess(seen.image(seed, LARGE, LARGE), bytes([seed])) for seed in seeds]
    prompt = (1, 2, 3, *(token for sight in sights for token in (*encode(sight.text), 4)), 5)
    return GenerationRequest(id, prompt, max_tokens, images=eyes.prompt_images(prompt, sights))


def room_for(model: Model, sequence: GenerationRequest) -> int:
    """Bytes that it needs alone."""
    tokens = [picture.tokens for picture in sequence.images]
    images = ImageDemand(tokens[0], sum(tokens), prepared_bytes=sum(picture.nbytes for picture in sequence.images))
    return model.costs.peak_bytes([[len(sequence.prompt) + sequence.max_tokens]], images=images)


def test_images_are_looked_at_within_the_memory_that_was_promised(large: Model) -> None:
    sequences = [shown(large, str(at), 2 * at, 2 * at + 1) for at in range(4)]
    limit, highest = room_for(large, sequences[0]) * 11 // 10, 0
    run = Run(large, memory=limit, prefix_bytes=1 << 24)
    for sequence in sequences:
        run.submit(sequence)
    while len(run.engine):
        run.step()
        highest = max(highest, mx.get_peak_memory())
    assert set(run.ended.values()) <= {"length", "stop"}
    beside = limit - large.costs.resident_bytes
    assert large.costs.encoder.bytes_for(ImageDemand(sequences[0].images[0].tokens)) > beside / 3, "else it is nothing"
    assert limit - 2 * beside / 3 < highest <= limit


def test_an_image_that_is_computed_at_once_is_promised_the_chunk_that_it_makes(tmp_path: Path) -> None:
    folder = write_checkpoint("gemma4 with experts", tmp_path)
    _change(folder / "processor_config.json", {"image_processor": {"max_soft_tokens": 2 * CHUNK}})
    _change(folder / "config.json", {"vision_config": {"default_output_length": 2 * CHUNK}})
    model = in_memory(open_model(str(folder)))
    run, highest = Run(model), 0
    run.submit(sequence := shown(model, "sees", 1))
    run.until(lambda: "sees" in run.inside and run.engine._prefills.images("sees").largest == 0)
    images, lengths = run.engine._prefills.images("sees"), [[len(sequence.prompt) + sequence.max_tokens]]
    while not run.said["sees"]:
        run.step()
        highest = max(highest, mx.get_peak_memory())
    beside = highest - model.costs.resident_bytes
    promised, less = (
        model.costs.peak_bytes(lengths, images=each) - model.costs.resident_bytes
        for each in (images, replace(images, longest=CHUNK))
    )
    assert 1.2 * less < beside < 1.1 * promised, (less, beside, promised)


def test_an_image_that_never_fits_is_refused_with_a_sentence_and_harms_no_other(large: Model) -> None:
    sequence = shown(large, "never", 1)
    run = Run(large, memory=room_for(large, sequence) - 1)
    run.add("text", (1, 2, 3), max_tokens=8)
    run.step()
    run.submit(sequence)
    run.drain()
    assert run.ended["never"] == "refused"
    assert "while its images are looked at" in run.refused["never"]
    assert run.encoded["never"] == 0
    assert len(run.said["text"]) > 0


def test_a_row_waits_while_another_s_images_need_its_memory_and_no_longer(large: Model) -> None:
    first, second = (shown(large, id, seed, max_tokens=60) for id, seed in (("first", 1), ("second", 2)))
    tokens, image = len(first.prompt) + 60, first.images[0].tokens
    images = ImageDemand(image, image, prepared_bytes=2 * first.images[0].nbytes)
    one_of_two = large.costs.peak_bytes([[tokens, tokens]], images=images)
    run = Run(large, step_s=1e-6, memory=one_of_two, prefix_bytes=0)
    run.group_by(ONE_GROUP)
    run.submit(first)
    run.step()
    run.submit(second)
    run.step()
    assert (run.inside, run.waiting) == (["first"], ["second"])
    run.until(lambda: "second" in run.inside)
    assert "first" not in run.ended
    run.drain()
