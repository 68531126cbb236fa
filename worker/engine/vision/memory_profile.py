"""Measure the memory that a vision encoder needs for an image. It grows with the image, and with its square if the
device materializes attention scores. Encoders' layers differ too much to derive it from a config."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from worker.engine.memory import EncoderCost, MemoryModel
from worker.engine.vision.encoder import EncoderRun
from worker.engine.vision.load import Vision
from worker.request import ProcessedImage, PromptImage

# Pixels per side: some 250 and 1,000 patches, enough for attention scores to show and quick enough for a start. The
# larger sizes are for processors that give the first two the same number of tokens.
_SIDES = 256, 512, 1024, 2048
# Measurements, of which the largest counts: how much is held at once depends on how far evaluation runs ahead of the
# device. With small images beside other work they varied by a quarter.
_MEASUREMENTS = 4
# For each pair of tokens of an image with a bidirectional mask: see `bidirectional`. One byte, and the mask exists
# twice while it is built.
_MASK_BYTES = 2


def with_encoder_cost(costs: MemoryModel, vision: Vision, sides: Sequence[int] = _SIDES) -> MemoryModel:
    """Return the costs with the measured costs of images. `sides`: sizes of blank test images in pixels. Encodes some,
    so it loads the encoder's weights. Blocks."""
    blanks = _blank(vision, sides)
    small = next(blanks)
    large = next((image for image in blanks if image.tokens > small.tokens), small)
    _measure(vision, small)  # some encoders build tables at first use
    (small_bytes, features, _), (large_bytes, _, seconds) = (_most(vision, image) for image in (small, large))
    encoder_cost = EncoderCost.of(
        (small.tokens, small_bytes), (large.tokens, large_bytes), -(-features // small.tokens)
    )
    encoder_cost = replace(encoder_cost, tokens_per_s=large.tokens / seconds)
    if not vision.family.bidirectional_images:
        return replace(costs, encoder=encoder_cost)
    return replace(costs, encoder=replace(encoder_cost, single_chunk=True), score_bytes=costs.score_bytes + _MASK_BYTES)


def _blank(vision: Vision, sides: Sequence[int]) -> Iterator[ProcessedImage]:
    from worker.engine.upstream.mlx_vlm import new_image  # slow to import

    for side in sides:
        yield vision.image_processor.preprocess(new_image("RGB", (side, side)), b"blank")


def _most(vision: Vision, image: ProcessedImage) -> tuple[int, int, float]:
    """Return the most bytes and the fewest seconds of several measurements, with the bytes of the features."""
    measured = [_measure(vision, image) for _ in range(_MEASUREMENTS)]
    return max(measured)[0], measured[0][1], min(seconds for *_, seconds in measured)


def _measure(vision: Vision, image: ProcessedImage) -> tuple[int, int, float]:
    """Return the peak bytes while encoding an image, the bytes of its features, and the seconds."""
    mx.clear_cache()  # else cached buffers would be reused, and the peak would be too low
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    run = EncoderRun(PromptImage(image.digest, (0, image.tokens), image.pixel_inputs), vision.family.encode)
    while (features := run.features) is None:
        run.advance(1)
    return mx.get_peak_memory() - before, features.nbytes, max(time.perf_counter() - began, 1e-6)
