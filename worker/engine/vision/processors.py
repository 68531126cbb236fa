"""Preprocess images with the model's own processor. Nothing here uses MLX, so any thread may do it."""

from collections.abc import Callable, Sequence
from typing import Any

from worker.request import ProcessedImage, PromptImage

# From Pillow's image, in RGB, to the pixel inputs, the text of the image in a prompt, the tokens of this text from the
# first placeholder to the last, and the number of placeholders among them.
Process = Callable[[Any], tuple[Any, str, int, int]]


class ImageProcessor:
    """Image processor of one model; a worker has one. The functions below create that of each family."""

    def __init__(self, marker: str, placeholder: int, process: Process) -> None:
        """`marker`: what stands for an image in the template's text. `placeholder`: the token that stands for a part of
        an image in a prompt."""
        self.marker = marker
        self._placeholder, self._process = placeholder, process

    def preprocess(self, image: Any, digest: bytes) -> ProcessedImage:
        """Return an image as the model receives it. `image`: Pillow's, in RGB; `digest`: a unique key for its content.
        Blocks for long, so it is not for the event loop. Raises ValueError for an image that the model's processor
        rejects."""
        pixel_inputs, text, tokens, placeholders = self._process(image)
        return ProcessedImage(digest, text, tokens, placeholders, pixel_inputs, pixel_inputs["pixel_values"].nbytes)

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


def qwen(processor: Any, placeholder: int) -> ImageProcessor:
    """Return the processor of Qwen: a grid of patches, whose number grows with the size of the image."""
    of_images = processor.image_processor
    # One frame instead of two equal ones: a photo's frames take 100 MB each, and numpy holds the interpreter's lock
    # while it copies the second. `Qwen.encode` repeats the frame on the device.
    of_images.temporal_patch_size = 1

    def process(image: Any) -> tuple[Any, str, int, int]:
        pixel_inputs = of_images(images=[image])
        tokens = int(pixel_inputs["image_grid_thw"].prod()) // of_images.merge_size**2
        return pixel_inputs, processor.image_token * tokens, tokens, tokens

    return ImageProcessor(processor.image_token, placeholder, process)


def gemma3(processor: Any, placeholder: int) -> ImageProcessor:
    """Return the processor of Gemma 3: each image is resized to a square, and all have the same number of tokens."""

    def process(image: Any) -> tuple[Any, str, int, int]:
        tokens = processor.image_seq_length
        pixel_inputs = processor.image_processor(images=[image], return_tensors="np")
        return pixel_inputs, processor.full_image_sequence, tokens, tokens

    return ImageProcessor(processor.boi_token, placeholder, process)


def gemma4(processor: Any, placeholder: int) -> ImageProcessor:
    """Return the processor of Gemma 4: the number of tokens, which stand between those of begin and end, depends on the
    aspect ratio, up to a maximum."""

    def process(image: Any) -> tuple[Any, str, int, int]:
        pixel_inputs, (tokens,) = processor.image_processor(images=[image])
        text = processor.boi_token + processor.image_token * tokens + processor.eoi_token
        return pixel_inputs, text, tokens, tokens

    return ImageProcessor(processor.image_token, placeholder, process)


def pixtral(processor: Any, placeholder: int) -> ImageProcessor:
    """Return the processor of Pixtral: each row of an image ends with a break token, and the last one with an end
    token."""

    def process(image: Any) -> tuple[Any, str, int, int]:
        side = processor.patch_size * processor.spatial_merge_size
        pixel_inputs = processor.image_processor([image], patch_size=side)
        rows, columns = (pixels // side for pixels in pixel_inputs["image_sizes"][0])
        rows_of_text = [processor.image_token * columns] * rows
        text = processor.image_break_token.join(rows_of_text) + processor.image_end_token
        return pixel_inputs, text, rows * (columns + 1) - 1, rows * columns

    return ImageProcessor(processor.image_token, placeholder, process)
