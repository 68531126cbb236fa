"""Preprocess images with the model's own processor. Nothing here uses MLX, so any thread may do it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from worker.request import ProcessedImage, PromptImage


class ImageProcessor(ABC):
    """Image processor of one model; a worker has one."""

    def __init__(self, processor: Any, placeholder: int) -> None:
        """`placeholder`: the token that stands for a part of an image in a prompt."""
        self._processor, self._placeholder = processor, placeholder
        self.marker: str = processor.image_token  # stands for an image in the template's text

    @abstractmethod
    def preprocess(self, image: Any, digest: bytes) -> ProcessedImage:
        """Return an image as the model receives it. `image`: Pillow's, in RGB; `digest`: a unique key for its content.
        Blocks for long, so it is not for the event loop. Raises ValueError for an image that the model's processor
        rejects."""

    def prompt_images(self, prompt: tuple[int, ...], images: Sequence[ProcessedImage]) -> tuple[PromptImage, ...]:
        """Return the images with their spans in a tokenized prompt that contains their texts, in order. Raises
        ValueError if the prompt has other placeholders."""
        if prompt.count(self._placeholder) != sum(image.placeholders for image in images):
            raise ValueError("a text contains the model's own placeholder for a part of an image")
        placed, at = list[PromptImage](), 0
        for image in images:
            start = prompt.index(self._placeholder, at)
            at = start + image.tokens
            placed.append(PromptImage(image.digest, (start, at), image.pixel_inputs, image.nbytes))
        return tuple(placed)


class QwenImageProcessor(ImageProcessor):
    """Processor of Qwen: the number of tokens grows with the size of the image."""

    def __init__(self, processor: Any, placeholder: int) -> None:
        super().__init__(processor, placeholder)
        # One frame instead of two equal ones: a photo's frames take 100 MB each, and numpy holds the interpreter's lock
        # while it copies the second. `Qwen.encode` repeats the frame on the device.
        processor.image_processor.temporal_patch_size = 1

    def preprocess(self, image: Any, digest: bytes) -> ProcessedImage:
        """Return the image as a grid of patches, in one frame."""
        process = self._processor.image_processor
        pixel_inputs = process(images=[image])
        tokens = int(pixel_inputs["image_grid_thw"].prod()) // process.merge_size**2
        return ProcessedImage(
            digest, self.marker * tokens, tokens, tokens, pixel_inputs, pixel_inputs["pixel_values"].nbytes
        )


class Gemma3ImageProcessor(ImageProcessor):
    """Processor of Gemma 3: each image is resized to a square, and all have the same number of tokens."""

    def __init__(self, processor: Any, placeholder: int) -> None:
        super().__init__(processor, placeholder)
        self.marker = processor.boi_token

    def preprocess(self, image: Any, digest: bytes) -> ProcessedImage:
        """Return the image as one square of pixels."""
        pixel_inputs = self._processor.image_processor(images=[image], return_tensors="np")
        tokens = self._processor.image_seq_length
        return ProcessedImage(
            digest,
            self._processor.full_image_sequence,
            tokens,
            tokens,
            pixel_inputs,
            pixel_inputs["pixel_values"].nbytes,
        )


class Gemma4ImageProcessor(ImageProcessor):
    """Processor of Gemma 4: the number of tokens depends on the aspect ratio, up to a maximum."""

    def preprocess(self, image: Any, digest: bytes) -> ProcessedImage:
        """Return the image between its begin and end tokens."""
        processor = self._processor
        pixel_inputs, (tokens,) = processor.image_processor(images=[image])
        text = processor.boi_token + self.marker * tokens + processor.eoi_token
        return ProcessedImage(digest, text, tokens, tokens, pixel_inputs, pixel_inputs["pixel_values"].nbytes)


class PixtralImageProcessor(ImageProcessor):
    """Processor of Pixtral: each row of an image ends with a break token, and the last row with an end token."""

    def preprocess(self, image: Any, digest: bytes) -> ProcessedImage:
        """Return the image with a token after each row."""
        processor = self._processor
        side = processor.patch_size * processor.spatial_merge_size
        pixel_inputs = processor.image_processor([image], patch_size=side)
        rows, columns = (pixels // side for pixels in pixel_inputs["image_sizes"][0])
        text = processor.image_break_token.join([self.marker * columns] * rows) + processor.image_end_token
        return ProcessedImage(
            digest, text, rows * (columns + 1) - 1, rows * columns, pixel_inputs, pixel_inputs["pixel_values"].nbytes
        )
