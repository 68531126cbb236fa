"""The memory of images is predicted before they are encoded: requests that do not fit wait or are refused."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models.tiny_vision import CONFIGS, write_checkpoint
from tests.engine.driver import ONE_GROUP, Run
from tests.engine.vision import cases
from worker.engine.memory import CHUNK, ImageDemand, MemoryModel
from worker.engine.model.load import Model, open_model
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.vision.feature_cache import EncoderRun
from worker.engine.vision.load import Vision, open_vision, with_encoder_cost
from worker.request import GenerationRequest, ProcessedImage, PromptImage

FAMILIES = [*CONFIGS]
TINY = 200_000  # bytes: with small images, arrays of a fixed size count
BESIDE_OTHERS = 1.5  # on a busy machine, measurements of such images vary by a quarter


def roomy(family: str, folder: Path, side: int) -> Path:
    """Write a checkpoint that does not scale images of this many pixels a side, if its family has images of any
    size."""
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
    generated = json.loads(file.read_text())
    parts = {name: {**generated.get(name, {}), **value} for name, value in values.items() if isinstance(value, dict)}
    file.write_text(json.dumps({**generated, **values, **parts}))


def needed(vision: Vision, processed: ProcessedImage) -> int:
    """Return the peak bytes while the image is encoded as the engine does it."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    encoding = EncoderRun(
        PromptImage(processed.digest, (0, processed.tokens), processed.pixel_inputs), vision.family.encode
    )
    while encoding.features is None:
        encoding.advance(1)
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_needs_about_what_was_predicted(family: str, tmp_path: Path) -> None:
    _, _, vision = open_vision(roomy(family, tmp_path, side=128), trusted=False)
    mx.eval(vision.network.parameters())
    gc.collect()  # what other tests have left would go while it is measured
    encoder = with_encoder_cost(MemoryModel(0), vision, sides=(48, 80)).encoder
    for width, height in (48, 32), (80, 80), (96, 64), (128, 112):
        processed = vision.image_processor.preprocess(cases.image(1, width, height), b"")
        predicted, measured = encoder.bytes_for(ImageDemand(processed.tokens)), needed(vision, processed)
        assert predicted / BESIDE_OTHERS - TINY < measured < BESIDE_OTHERS * predicted + TINY, (width, height)


@pytest.mark.parametrize("family", FAMILIES)
def test_nbytes_of_an_image_are_those_of_its_pixel_inputs(family: str) -> None:
    (prompt_image,) = cases.image_request(family, "", cases.prompt(family, 3, (1, 64, 56), 4), 1).images
    arrays = [each for each in prompt_image.pixel_inputs.values() if isinstance(each, np.ndarray)]
    assert 0.99 < prompt_image.nbytes / sum(array.nbytes for array in arrays) <= 1


LARGE = 96  # pixels a side


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(roomy("qwen3_vl", tmp_path_factory.mktemp("large") / "model", side=LARGE)))


@pytest.fixture
def large(opened: Model) -> Model:
    return in_memory(opened)


def in_memory(model: Model) -> Model:
    """Return the model with weights that include what other tests have left in memory."""
    gc.collect()
    mx.clear_cache()
    return replace(model, costs=replace(model.costs, weights_bytes=mx.get_active_memory()))


def shown(model: Model, id: str, *seeds: int, max_tokens: int = 8) -> GenerationRequest:
    """A prompt with as many images."""
    assert model.vision is not None
    image_processor, encode = model.vision.image_processor, MLXTokenizer(model.tokenizer).encode
    images = [image_processor.preprocess(cases.image(seed, LARGE, LARGE), bytes([seed])) for seed in seeds]
    prompt = (1, 2, 3, *(token for processed in images for token in (*encode(processed.text), 4)), 5)
    return GenerationRequest(id, prompt, max_tokens, images=image_processor.prompt_images(prompt, images))


def memory_for(model: Model, request: GenerationRequest) -> int:
    """Bytes that it needs alone."""
    tokens = [prompt_image.tokens for prompt_image in request.images]
    images = ImageDemand(
        tokens[0], sum(tokens), prepared_bytes=sum(prompt_image.nbytes for prompt_image in request.images)
    )
    return model.costs.peak_bytes([[len(request.prompt) + request.max_tokens]], images=images)


def test_images_are_encoded_within_the_reserved_memory(large: Model) -> None:
    requests = [shown(large, str(at), 2 * at, 2 * at + 1) for at in range(4)]
    resident, highest = large.costs.resident_bytes, 0
    beside = (memory_for(large, requests[0]) - resident) * 11 // 10
    limit = resident + beside
    run = Run(large, memory=limit, prefix_bytes=1 << 24)
    for request in requests:
        run.submit(request)
    while len(run.engine):
        run.step()
        highest = max(highest, mx.get_peak_memory())
    assert set(run.ended.values()) <= {"length", "stop"}
    assert large.costs.encoder.bytes_for(ImageDemand(requests[0].images[0].tokens)) > beside / 3, (
        "else the image does not matter"
    )
    assert limit - 2 * beside / 3 < highest <= limit


@pytest.mark.slow
def test_image_computed_in_one_chunk_stays_within_the_reserved_memory(tmp_path: Path) -> None:
    folder = write_checkpoint("gemma4 with experts", tmp_path)
    _change(folder / "processor_config.json", {"image_processor": {"max_soft_tokens": 2 * CHUNK}})
    _change(folder / "config.json", {"vision_config": {"default_output_length": 2 * CHUNK}})
    model = in_memory(open_model(str(folder)))
    run, highest = Run(model), 0
    run.submit(request := shown(model, "sees", 1))
    run.until(lambda: "sees" in run.active and run.engine._prefills.images("sees").largest == 0)
    images, lengths = run.engine._prefills.images("sees"), [[len(request.prompt) + request.max_tokens]]
    while not run.generated["sees"]:
        run.step()
        highest = max(highest, mx.get_peak_memory())
    beside = highest - model.costs.resident_bytes
    promised, less = (
        model.costs.peak_bytes(lengths, images=each) - model.costs.resident_bytes
        for each in (images, replace(images, longest=CHUNK))
    )
    assert 1.2 * less < beside < 1.1 * promised, (less, beside, promised)


def test_image_that_never_fits_is_refused_and_harms_no_other_row(large: Model) -> None:
    request = shown(large, "never", 1)
    run = Run(large, memory=memory_for(large, request) - 1)
    run.add("text", (1, 2, 3), max_tokens=8)
    run.step()
    run.submit(request)
    run.drain()
    assert run.ended["never"] == "refused"
    assert "while its images are encoded" in run.refused["never"]
    assert run.encoded["never"] == 0
    assert len(run.generated["text"]) > 0


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
    assert (run.active, run.waiting) == (["first"], ["second"])
    run.until(lambda: "second" in run.active)
    assert "first" not in run.ended
    run.drain()
