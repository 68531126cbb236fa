"""Measure the memory that a vision encoder needs for an image. It grows with the image, and with its square if the
device materializes attention scores. Encoders' layers differ too much to derive it from a config."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from worker.engine.vision.encoder import EncoderRun
from worker.engine.vision.load import Vision
from worker.schedule.memory import EncoderCost, MemoryModel
from worker.schedule.request import ProcessedImage, PromptImage

# Pixels per side: some 250 and 1,000 patches, enough for attention scores to show and quick enough for a start. The
# larger sizes are for processors that give the first two the same number of tokens.
_SIDES = 256, 512, 1024, 2048
_LOOKS = 2  # measurements, of which the larger counts; with small images they varied by a fifth
# For each pair of tokens of an image with a bidirectional mask: see `bidirectional`. One byte, and the mask exists
# twice while it is built.
_MASK_BYTES = 2


def with_encoder_cost(costs: MemoryModel, vision: Vision, sides: Sequence[int] = _SIDES) -> MemoryModel:
    """Return the costs with the measured costs of images. `sides`: sizes of blank test images in pixels. Encodes some,
    so it loads the encoder's weights. Blocks."""
    sights = _blank(vision, sides)
    few = next(sights)
    many = next((sight for sight in sights if sight.tokens > few.tokens), few)
    _measure(vision, few)  # some encoders build tables at first use
    (needed, features), (needed_more, _) = (
        max(_measure(vision, sight) for _ in range(_LOOKS)) for sight in (few, many)
    )
    tower = EncoderCost.of((few.tokens, needed), (many.tokens, needed_more), -(-features // few.tokens))
    if not vision.family.bidirectional_images:
        return replace(costs, encoder=tower)
    return replace(costs, encoder=replace(tower, whole=True), score_bytes=costs.score_bytes + _MASK_BYTES)


def _blank(vision: Vision, sides: Sequence[int]) -> Iterator[ProcessedImage]:
    from worker.engine.upstream.mlx_vlm import new_image  # slow to import

    for side in sides:
        yield vision.image_processor.preprocess(new_image("RGB", (side, side)), b"blank")


def _measure(vision: Vision, sight: ProcessedImage) -> tuple[int, int]:
    """Return the peak bytes while encoding an image, and the bytes of its features."""
    mx.clear_cache()  # else cached buffers would be reused, and the peak would be too low
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    encoding = EncoderRun(PromptImage(sight.digest, (0, sight.tokens), sight.pixel_inputs), vision.family.encode)
    while (features := encoding.features) is None:
        encoding.advance(1)
    return mx.get_peak_memory() - before, features.nbytes
