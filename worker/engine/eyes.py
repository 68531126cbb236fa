"""Images as a model's own processor prepares them. Nothing here computes with MLX, so any thread may do it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from worker.schedule.sequence import Picture, Sight


class Eyes(ABC):
    """Of one model; a worker has one pair."""

    def __init__(self, processor: Any, placeholder: int) -> None:
        """`placeholder`: the token that stands where an image is."""
        self._processor, self._placeholder = processor, placeholder
        self.marker: str = processor.image_token  # an image, in the template's text

    @abstractmethod
    def look(self, image: Any, digest: bytes) -> Sight:
        """`image`: Pillow's, in RGB, and `digest` what tells it from all others. Takes its time. Raises ValueError for
        one that the model's processor does not take."""

    def pictures(self, prompt: tuple[int, ...], sights: Sequence[Sight]) -> tuple[Picture, ...]:
        """Where they are in a prompt that has their texts in it. Raises ValueError where it has other placeholders."""
        if prompt.count(self._placeholder) != sum(sight.placeholders for sight in sights):
            raise ValueError("a text has the model's own sign for a part of an image in it")
        pictures, at = list[Picture](), 0
        for sight in sights:
            start = prompt.index(self._placeholder, at)
            at = start + sight.tokens
            pictures.append(Picture(sight.digest, (start, at), sight.seen, sight.nbytes))
        return tuple(pictures)


class GridEyes(Eyes):
    """Qwen's: as many tokens as the image is large."""

    def __init__(self, processor: Any, placeholder: int) -> None:
        super().__init__(processor, placeholder)
        # A film of one frame, not of two that are equal: a photo's have a hundred megabytes each, and numpy keeps the
        # interpreter's lock while it makes the second. See `Qwen.encode`, which does.
        processor.image_processor.temporal_patch_size = 1

    def look(self, image: Any, digest: bytes) -> Sight:
        process = self._processor.image_processor
        seen = process(images=[image])
        tokens = int(seen["image_grid_thw"].prod()) // process.merge_size**2
        return Sight(digest, self.marker * tokens, tokens, tokens, seen, seen["pixel_values"].nbytes)


class SquareEyes(Eyes):
    """Gemma 3's: each image is a square, and has as many tokens as any other."""

    def __init__(self, processor: Any, placeholder: int) -> None:
        super().__init__(processor, placeholder)
        self.marker = processor.boi_token

    def look(self, image: Any, digest: bytes) -> Sight:
        seen = self._processor.image_processor(images=[image], return_tensors="np")
        tokens = self._processor.image_seq_length
        return Sight(digest, self._processor.full_image_sequence, tokens, tokens, seen, seen["pixel_values"].nbytes)


class SoftEyes(Eyes):
    """Gemma 4's: as many tokens as the image's shape makes of those it may have at most."""

    def look(self, image: Any, digest: bytes) -> Sight:
        processor = self._processor
        seen, (tokens,) = processor.image_processor(images=[image])
        text = processor.boi_token + self.marker * tokens + processor.eoi_token
        return Sight(digest, text, tokens, tokens, seen, seen["pixel_values"].nbytes)


class RowEyes(Eyes):
    """Pixtral's: each row of an image ends with a token that says so, and the last one with another."""

    def look(self, image: Any, digest: bytes) -> Sight:
        processor = self._processor
        side = processor.patch_size * processor.spatial_merge_size
        seen = processor.image_processor([image], patch_size=side)
        rows, columns = (pixels // side for pixels in seen["image_sizes"][0])
        text = processor.image_break_token.join([self.marker * columns] * rows) + processor.image_end_token
        return Sight(digest, text, rows * (columns + 1) - 1, rows * columns, seen, seen["pixel_values"].nbytes)
