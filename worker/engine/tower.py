"""What a vision tower needs for an image, measured: it grows with the image, and with its square where the device holds
attention's scores. Towers differ too much in their layers to tell it from a config."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from worker.engine.encoding import Encoding
from worker.engine.vision import Vision
from worker.schedule.memory import Costs, Tower
from worker.schedule.sequence import Picture, Sight

# Pixels a side. Large enough for the scores to show, and small enough for a start: some 250 patches, and 1,000. What
# follows is for processors that make them equal, which most do because all images are.
_SIDES = 256, 512, 1024, 2048
_LOOKS = 2  # what is freed when is left to chance; a fifth more or less was seen, where all is small
# Of the mask of an image whose tokens see one another, for each pair: see `bidirectional`. While it is made, it is
# there twice.
_MASK_BYTES = 2


def with_tower(costs: Costs, vision: Vision, sides: Sequence[int] = _SIDES) -> Costs:
    """Looks at blank images, so it takes the tower's weights in."""
    sights = _blank(vision, sides)
    few = next(sights)
    many = next((sight for sight in sights if sight.tokens > few.tokens), few)
    _look(vision, few)  # some towers make tables when they are first used
    (needed, features), (needed_more, _) = (max(_look(vision, sight) for _ in range(_LOOKS)) for sight in (few, many))
    tower = Tower.of((few.tokens, needed), (many.tokens, needed_more), -(-features // few.tokens))
    if not vision.family.whole:
        return replace(costs, tower=tower)
    return replace(costs, tower=replace(tower, whole=True), score_bytes=costs.score_bytes + _MASK_BYTES)


def _blank(vision: Vision, sides: Sequence[int]) -> Iterator[Sight]:
    from worker.engine.upstream_vision import new_image  # heavy

    for side in sides:
        yield vision.eyes.look(new_image("RGB", (side, side)), b"blank")


def _look(vision: Vision, sight: Sight) -> tuple[int, int]:
    """Bytes at the most, and of them those of what the language model gets."""
    mx.clear_cache()  # MLX takes what is there for less than it is
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    encoding = Encoding(Picture(sight.digest, (0, sight.tokens), sight.seen), vision.family.encode)
    while (features := encoding.features) is None:
        encoding.advance(1)
    return mx.get_peak_memory() - before, features.nbytes
