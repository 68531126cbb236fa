"""Differences between families of vision models: how an image is preprocessed and becomes features, and how its tokens
are computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache.kinds import kind_of
from worker.engine.upstream.hooks import recorded_layers
from worker.engine.vision.feature_cache import Features
from worker.engine.vision.inputs import Family, ImageSpans
from worker.request import ProcessedImage, PromptImage

Embed = Callable[[mx.array], mx.array]  # from tokens (1, tokens) to rows (1, tokens, hidden_size)
MakeCache = Callable[[nn.Module], list[Any]]  # mlx-vlm's `make_prompt_cache`, for its own language models
MakeFamily = Callable[[nn.Module, nn.Module, MakeCache], Family]  # from the vision model and its text model
# From Pillow's image, in RGB, to the pixel inputs, the text of the image in a prompt, the tokens of this text from the
# first placeholder to the last, and the number of placeholders among them.
Process = Callable[[Any], tuple[Any, str, int, int]]


class Qwen:
    """Qwen 2-VL to 3.5: image tokens have a row and a column position (M-RoPE), and the text after an image continues
    at a smaller position than its index. mlx-lm's classes do not support such positions, so mlx-vlm's compute these
    prompts. From Qwen 3 on, outputs of intermediate encoder layers are added after the first layers of the language
    model (DeepStack). See `Family` for the methods."""

    bidirectional_images = False

    def __init__(self, vlm: nn.Module, text_model: nn.Module, make_cache: MakeCache) -> None:
        self._encoder = vlm.vision_tower
        self._language = vlm.language_model
        self._embed: Embed = vlm.language_model.model.embed_tokens
        self._make_cache = make_cache
        self._vision_config = vlm.config.vision_config
        self._merge = self._vision_config.spatial_merge_size
        self.placeholder: int = vlm.config.image_token_id

    def encode(self, pixel_inputs: Any, layer_outputs: list[mx.array]) -> Features:
        """Build the features of an image; see `Family.encode`."""
        with recorded_layers(self._encoder, "blocks", layer_outputs):
            outputs = self._encoder(
                self._repeat_frames(pixel_inputs["pixel_values"]), mx.array(pixel_inputs["image_grid_thw"])
            )
        rows, deepstack = outputs if isinstance(outputs, tuple) else (outputs, ())
        return Features(rows, tuple(deepstack))

    def _repeat_frames(self, patches: Any) -> mx.array:
        """Repeat the frame as often as the encoder expects. A patch (values) holds one colour after the other, and for
        each colour one frame after the other."""
        colours = mx.array(patches).astype(self._encoder.patch_embed.proj.weight.dtype)
        apart = colours.reshape(len(patches), self._vision_config.in_channels, 1, -1)
        return mx.repeat(apart, self._vision_config.temporal_patch_size, axis=2).reshape(len(patches), -1)

    def positions(self, tokens: int, images: Sequence[PromptImage]) -> tuple[mx.array | None, int]:
        """Return M-RoPE positions (3, 1, tokens) as frame, row and column, and the rope delta."""
        parts = list[mx.array]()
        place = 0
        position = 0
        for image in images:
            start, end = image.span
            parts.append(_text_positions(position, start - place))
            position += start - place
            ((frames, height, width),) = image.pixel_inputs["image_grid_thw"]
            rows, columns = int(height) // self._merge, int(width) // self._merge
            parts.append(position + _grid_positions(int(frames), rows, columns))
            position, place = position + max(int(frames), rows, columns), end
        parts.append(_text_positions(position, tokens - place))
        position += tokens - place
        return mx.concatenate(parts, axis=1)[:, None], position - tokens

    def embeddings(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of tokens (1, tokens); see `Family.embeddings`."""
        return self._embed(tokens)

    def read(
        self, cache: list[Any], tokens: mx.array, rows: mx.array, positions: mx.array | None, images: ImageSpans
    ) -> None:
        """Compute the tokens with mlx-vlm's language model; see `Family.read`."""
        vlm_cache = self._make_cache(self._language)
        with lent_to(cache, vlm_cache):
            self._language(
                tokens,
                inputs_embeds=rows,
                cache=vlm_cache,
                position_ids=positions,
                **self._deepstack_inputs(tokens, images),
            )

    def _deepstack_inputs(self, tokens: mx.array, images: ImageSpans) -> dict[str, Any]:
        each = [features.deepstack for _, features in images]
        if not any(each):
            return {}
        return {
            "visual_pos_masks": _image_mask(tokens, images),
            "deepstack_visual_embeds": [mx.concatenate(list(layer)) for layer in zip(*each, strict=True)],
        }


class _SequentialFamily:
    """Base of families whose image tokens have ordinary positions: mlx-lm's class computes them from embeddings. See
    `Family` for the methods."""

    bidirectional_images = False

    def __init__(self, vlm: nn.Module, text_model: nn.Module, make_cache: MakeCache) -> None:
        self._vlm = vlm
        self._encoder = vlm.vision_tower
        self._text_model = text_model
        self._embed: Embed = vlm.language_model.model.embed_tokens

    @property
    def placeholder(self) -> int:
        """The token that stands for a part of an image."""
        return int(self._vlm.config.image_token_index)

    def positions(self, tokens: int, images: Sequence[PromptImage]) -> tuple[mx.array | None, int]:
        """Return None and 0: positions are token indices."""
        return None, 0

    def embeddings(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of tokens (1, tokens); see `Family.embeddings`."""
        return self._embed(tokens)

    def read(
        self, cache: list[Any], tokens: mx.array, rows: mx.array, positions: mx.array | None, images: ImageSpans
    ) -> None:
        """Compute the tokens with mlx-lm's language model; see `Family.read`."""
        self._text_model(tokens, cache=cache, input_embeddings=rows)


class Gemma3(_SequentialFamily):
    """Gemma 3: one square per image, causal attention."""

    def encode(self, pixel_inputs: Any, layer_outputs: list[mx.array]) -> Features:
        """Build the features of an image; see `Family.encode`."""
        pixels = mx.array(pixel_inputs["pixel_values"]).transpose(0, 2, 3, 1).astype(_dtype(self._embed))
        with recorded_layers(self._encoder.vision_model.encoder, "layers", layer_outputs):
            outputs, _, _ = self._encoder(pixels, output_hidden_states=True)
        # The language model scales all embeddings by this factor; an image's must keep their scale.
        return Features(self._vlm.multi_modal_projector(outputs)[0] / self._vlm.config.text_config.hidden_size**0.5)


class Gemma4(_SequentialFamily):
    """Gemma 4: small models have additional inputs per layer, computed from token ids; in large ones the tokens of an
    image attend to each other."""

    def __init__(self, vlm: nn.Module, text_model: nn.Module, make_cache: MakeCache) -> None:
        super().__init__(vlm, text_model, make_cache)
        vlm.audio_tower = vlm.embed_audio = None  # audio is not served, so it takes no memory
        self._text = vlm.language_model.model
        self.bidirectional_images = self._vlm.config.text_config.use_bidirectional_attention == "vision"

    @property
    def placeholder(self) -> int:
        """The token that stands for a part of an image."""
        return int(self._vlm.config.image_token_id)

    def encode(self, pixel_inputs: Any, layer_outputs: list[mx.array]) -> Features:
        """Build the features of an image; see `Family.encode`."""
        with recorded_layers(self._encoder.encoder, "layers", layer_outputs):
            outputs = self._encoder(mx.array(pixel_inputs["pixel_values"]))
        rows = self._vlm.embed_vision(outputs)[0].astype(_dtype(self._embed))
        return Features(rows / self._text.embed_scale)  # as for Gemma 3, keep the scale

    def read(
        self, cache: list[Any], tokens: mx.array, rows: mx.array, positions: mx.array | None, images: ImageSpans
    ) -> None:
        """Compute the tokens with mlx-lm's language model, with a bidirectional mask within images if the model has
        one; see `Family.read`."""
        spans = [span for span, _ in images] if self.bidirectional_images else []
        self._text_model(
            tokens,
            cache=bidirectional(cache, tokens.size, spans),
            input_embeddings=rows,
            per_layer_inputs=self._inputs(tokens, images),
        )

    def _inputs(self, tokens: mx.array, images: ImageSpans) -> mx.array | None:
        """Return the additional inputs of all layers, or None. Image tokens have those of token 0."""
        if not self._text.hidden_size_per_layer_input:
            return None
        inputs: mx.array = self._text.get_per_layer_inputs(mx.where(_image_mask(tokens, images), 0, tokens))
        return inputs


class Pixtral(_SequentialFamily):
    """Pixtral and Mistral 3: each row of an image but the last is followed by a break token. The features have an
    unused row for it. Mistral 3 merges patches, so that a token covers a square of them."""

    def __init__(self, vlm: nn.Module, text_model: nn.Module, make_cache: MakeCache) -> None:
        super().__init__(vlm, text_model, make_cache)
        self._merge: int | None = getattr(vlm.config, "spatial_merge_size", None)  # patches; Pixtral merges none

    def encode(self, pixel_inputs: Any, layer_outputs: list[mx.array]) -> Features:
        """Build the features of an image; see `Family.encode`."""
        pixels, sizes = mx.array(pixel_inputs["pixel_values"]).transpose(0, 2, 3, 1), pixel_inputs["image_sizes"]
        with recorded_layers(self._encoder.vision_model.transformer, "layers", layer_outputs):
            *_, layers = self._encoder(pixels, output_hidden_states=True, image_sizes=sizes)
        project, outputs = self._vlm.multi_modal_projector, layers[self._vlm.config.vision_feature_layer][0]
        rows = project(outputs, sizes) if self._merge else project(outputs)
        side = self._vlm.config.vision_config.patch_size * (self._merge or 1)  # of a token, in pixels
        height = sizes[0][0] // side
        apart = mx.pad(rows.reshape(height, -1, rows.shape[-1]), [(0, 0), (0, 1), (0, 0)])
        return Features(apart.reshape(-1, rows.shape[-1])[:-1])


def _image_mask(tokens: mx.array, images: ImageSpans) -> mx.array:
    """Return a mask (1, tokens) of the tokens that belong to images. Placeholder ids alone are not sufficient, since a
    model may emit one as text."""
    mask = mx.zeros(tokens.shape, mx.bool_)
    for (first, last), _ in images:
        mask[:, first:last] = True
    return mask


def _dtype(embed: Embed) -> mx.Dtype:
    """Return the dtype of the embeddings, which may be stored quantized."""
    return embed(mx.array([0])).dtype


def _text_positions(position: int, tokens: int) -> mx.array:
    return mx.broadcast_to(mx.arange(position, position + tokens, dtype=mx.int32), (3, tokens))


def _grid_positions(frames: int, rows: int, columns: int) -> mx.array:
    """Return the frame, row and column of each token, (3, tokens)."""
    axes = mx.meshgrid(*(mx.arange(size, dtype=mx.int32) for size in (frames, rows, columns)), indexing="ij")
    return mx.stack([axis.reshape(-1) for axis in axes])


def bidirectional(cache: Sequence[Any], tokens: int, spans: Sequence[tuple[int, int]]) -> list[Any]:
    """Wrap cache layers for one forward of `tokens` tokens, so that the tokens of each image attend to each other.
    `spans`: the images as (start, end), counted from the forward's first token. The layers themselves are shared, not
    copied."""
    if all(last - first == 1 for first, last in spans):
        return list(cache)
    together = mx.zeros((tokens, tokens), mx.bool_)
    for first, last in spans:
        together[first:last, first:last] = True
    return [_Bidirectional(layer, together) for layer in cache]


class _Bidirectional:
    """The part of a cache layer that mlx-lm's attention uses, with another mask."""

    def __init__(self, layer: Any, together: mx.array) -> None:
        self._layer, self._together = layer, together

    @property
    def offset(self) -> Any:
        return self._layer.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched: tuple[mx.array, mx.array] = self._layer.update_and_fetch(keys, values)
        return fetched

    def make_mask(self, tokens: int, **how: Any) -> mx.array:
        causal: mx.array = self._layer.make_mask(tokens, **{**how, "return_array": True})
        before = causal.shape[-1] - tokens
        return causal | mx.pad(self._together, [(0, 0), (before, 0)])


@contextmanager
def lent_to(cache: Sequence[Any], other: Sequence[Any]) -> Iterator[None]:
    """Give the arrays of `cache`, one row's, to `other`, mlx-vlm's empty caches, and take the updated arrays back when
    the context closes. If the body raises, nothing is taken back. Raises NotImplementedError if the kinds of layers
    differ."""
    for layer, other_layer in zip(cache, other, strict=True):
        kind, other_kind = type(layer).__name__, type(other_layer).__name__
        if kind != other_kind:
            raise NotImplementedError(f"mlx-lm caches a layer as {kind}, mlx-vlm as {other_kind}")
        kind_of(layer).hand_over(layer, other_layer)
    yield
    for layer, other_layer in zip(cache, other, strict=True):
        kind_of(layer).hand_over(other_layer, layer)


class ImageProcessor:
    """Preprocesses images with the model's own processor; a worker has one. It uses no MLX, so any thread may do it.
    The functions below create that of each family."""

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


def qwen_processor(processor: Any, placeholder: int) -> ImageProcessor:
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


def gemma3_processor(processor: Any, placeholder: int) -> ImageProcessor:
    """Return the processor of Gemma 3: each image is resized to a square, and all have the same number of tokens."""

    def process(image: Any) -> tuple[Any, str, int, int]:
        tokens = processor.image_seq_length
        pixel_inputs = processor.image_processor(images=[image], return_tensors="np")
        return pixel_inputs, processor.full_image_sequence, tokens, tokens

    return ImageProcessor(processor.boi_token, placeholder, process)


def gemma4_processor(processor: Any, placeholder: int) -> ImageProcessor:
    """Return the processor of Gemma 4: the number of tokens, which stand between those of begin and end, depends on the
    aspect ratio, up to a maximum."""

    def process(image: Any) -> tuple[Any, str, int, int]:
        pixel_inputs, (tokens,) = processor.image_processor(images=[image])
        text = processor.boi_token + processor.image_token * tokens + processor.eoi_token
        return pixel_inputs, text, tokens, tokens

    return ImageProcessor(processor.image_token, placeholder, process)


def pixtral_processor(processor: Any, placeholder: int) -> ImageProcessor:
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
