"""Differences between families of vision models: how an image becomes features, and how its tokens are computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.vision.attention import bidirectional
from worker.engine.vision.cache_bridge import borrowed_by
from worker.engine.vision.encoder import Features, noting
from worker.engine.vision.inputs import Family, PixelInputs
from worker.schedule.request import PromptImage

MakeCache = Callable[[nn.Module], list[Any]]  # mlx-vlm's `make_prompt_cache`, for its own language models
MakeFamily = Callable[[nn.Module, nn.Module, MakeCache], Family]  # from the vision model and its text model


class Qwen:
    """Qwen 2-VL to 3.5: image tokens have a row and a column position (M-RoPE), and the text after an image continues
    at a smaller position than its index. mlx-lm's classes do not support such positions, so mlx-vlm's compute these
    prompts. See `Family` for the methods."""

    bidirectional_images = False

    def __init__(self, seeing: nn.Module, twin: nn.Module, make_cache: MakeCache) -> None:
        self._tower, self._language, self._make_cache = seeing.vision_tower, seeing.language_model, make_cache
        self._vlm = seeing.config.vision_config
        self._merge = self._vlm.spatial_merge_size
        self.placeholder: int = seeing.config.image_token_id

    def encode(self, seen: Any, passed: list[mx.array]) -> Features:
        """Build the features of an image; see `Family.encode`."""
        with _noted(self._tower, "blocks", passed):
            put_out = self._tower(self._film(seen["pixel_values"]), mx.array(seen["image_grid_thw"]))
        return self._features(put_out)

    def _film(self, patches: Any) -> mx.array:
        """Repeat the frame as often as the encoder expects. A patch (values) holds one colour after the other, and for
        each colour one frame after the other."""
        colours = mx.array(patches).astype(self._tower.patch_embed.proj.weight.dtype)
        apart = colours.reshape(len(patches), self._vlm.in_channels, 1, -1)
        return mx.repeat(apart, self._vlm.temporal_patch_size, axis=2).reshape(len(patches), -1)

    def _features(self, put_out: Any) -> Features:
        return Features(put_out)

    def positions(self, tokens: int, pictures: Sequence[PromptImage]) -> tuple[mx.array | None, int]:
        """Return M-RoPE positions (3, 1, tokens) as frame, row and column, and the rope delta."""
        parts, place, position = list[mx.array](), 0, 0
        for picture in pictures:
            start, end = picture.span
            parts.append(_straight(position, start - place))
            position += start - place
            ((frames, height, width),) = picture.pixel_inputs["image_grid_thw"]
            rows, columns = int(height) // self._merge, int(width) // self._merge
            parts.append(position + _grid(int(frames), rows, columns))
            position, place = position + max(int(frames), rows, columns), end
        parts.append(_straight(position, tokens - place))
        position += tokens - place
        return mx.concatenate(parts, axis=1)[:, None], position - tokens

    def embeddings(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of tokens (1, tokens); see `Family.embeddings`."""
        rows: mx.array = self._language.model.embed_tokens(tokens)
        return rows

    def read(
        self, cache: list[Any], tokens: mx.array, rows: mx.array, positions: mx.array | None, seen: PixelInputs
    ) -> None:
        """Compute the tokens with mlx-vlm's language model; see `Family.read`."""
        theirs = self._make_cache(self._language)
        with borrowed_by(cache, theirs):
            self._language(tokens, inputs_embeds=rows, cache=theirs, position_ids=positions, **self._deep(tokens, seen))

    def _deep(self, tokens: mx.array, seen: PixelInputs) -> dict[str, Any]:
        return {}


class DeepQwen(Qwen):
    """Qwen 3 and later: outputs of intermediate encoder layers are added after the first layers of the language model
    (DeepStack)."""

    def _features(self, put_out: Any) -> Features:
        rows, deepstack = put_out
        return Features(rows, tuple(deepstack))

    def _deep(self, tokens: mx.array, seen: PixelInputs) -> dict[str, Any]:
        each = [features.deepstack for _, features in seen]
        if not any(each):
            return {}
        return {
            "visual_pos_masks": _shown(tokens, seen),
            "deepstack_visual_embeds": [mx.concatenate(list(layer)) for layer in zip(*each, strict=True)],
        }


class Plain:
    """Families whose image tokens have ordinary positions: mlx-lm's class computes them from embeddings. See `Family`
    for the methods."""

    bidirectional_images = False

    def __init__(self, seeing: nn.Module, twin: nn.Module, make_cache: MakeCache) -> None:
        self._seeing, self._tower, self._twin = seeing, seeing.vision_tower, twin
        self._embed, self._config = seeing.language_model.model.embed_tokens, seeing.config

    @property
    def placeholder(self) -> int:
        """The token that stands for a part of an image."""
        token: int = self._config.image_token_index
        return token

    def positions(self, tokens: int, pictures: Sequence[PromptImage]) -> tuple[mx.array | None, int]:
        """Return None and 0: positions are token indices."""
        return None, 0

    def embeddings(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of tokens (1, tokens); see `Family.embeddings`."""
        rows: mx.array = self._embed(tokens)
        return rows

    def read(
        self, cache: list[Any], tokens: mx.array, rows: mx.array, positions: mx.array | None, seen: PixelInputs
    ) -> None:
        """Compute the tokens with mlx-lm's language model; see `Family.read`."""
        self._twin(tokens, cache=cache, input_embeddings=rows)


class Gemma3(Plain):
    """Gemma 3: one square per image, causal attention."""

    def encode(self, seen: Any, passed: list[mx.array]) -> Features:
        """Build the features of an image; see `Family.encode`."""
        pixels = mx.array(seen["pixel_values"]).transpose(0, 2, 3, 1).astype(_dtype(self._embed))
        with _noted(self._tower.vision_model.encoder, "layers", passed):
            put_out, _, _ = self._tower(pixels, output_hidden_states=True)
        # The language model scales all embeddings by this factor; an image's must keep their scale.
        return Features(self._seeing.multi_modal_projector(put_out)[0] / self._config.text_config.hidden_size**0.5)


class Gemma4(Plain):
    """Gemma 4: small models have additional inputs per layer, computed from token ids; in large ones the tokens of an
    image attend to each other."""

    def __init__(self, seeing: nn.Module, twin: nn.Module, make_cache: MakeCache) -> None:
        super().__init__(seeing, twin, make_cache)
        seeing.audio_tower = seeing.embed_audio = None  # audio is not served, so it takes no memory
        self._text = seeing.language_model.model
        self.bidirectional_images = self._config.text_config.use_bidirectional_attention == "vision"

    @property
    def placeholder(self) -> int:
        """The token that stands for a part of an image."""
        token: int = self._config.image_token_id
        return token

    def encode(self, seen: Any, passed: list[mx.array]) -> Features:
        """Build the features of an image; see `Family.encode`."""
        with _noted(self._tower.encoder, "layers", passed):
            put_out = self._tower(mx.array(seen["pixel_values"]))
        rows = self._seeing.embed_vision(put_out)[0].astype(_dtype(self._embed))
        return Features(rows / self._text.embed_scale)  # as for Gemma 3, keep the scale

    def read(
        self, cache: list[Any], tokens: mx.array, rows: mx.array, positions: mx.array | None, seen: PixelInputs
    ) -> None:
        """Compute the tokens with mlx-lm's language model, with a bidirectional mask within images if the model has
        one; see `Family.read`."""
        spans = [span for span, _ in seen] if self.bidirectional_images else []
        self._twin(
            tokens,
            cache=bidirectional(cache, tokens.size, spans),
            input_embeddings=rows,
            per_layer_inputs=self._inputs(tokens, seen),
        )

    def _inputs(self, tokens: mx.array, seen: PixelInputs) -> mx.array | None:
        """Return the additional inputs of all layers, or None. Image tokens have those of token 0."""
        if not self._text.hidden_size_per_layer_input:
            return None
        inputs: mx.array = self._text.get_per_layer_inputs(mx.where(_shown(tokens, seen), 0, tokens))
        return inputs


class Pixtral(Plain):
    """Pixtral: each row of an image but the last is followed by a break token. The features have an unused row for
    it."""

    def encode(self, seen: Any, passed: list[mx.array]) -> Features:
        """Build the features of an image; see `Family.encode`."""
        pixels, sizes = mx.array(seen["pixel_values"]).transpose(0, 2, 3, 1), seen["image_sizes"]
        with _noted(self._tower.vision_model.transformer, "layers", passed):
            *_, layers = self._tower(pixels, output_hidden_states=True, image_sizes=sizes)
        rows = self._projected(layers[self._config.vision_feature_layer][0], sizes)
        height, _ = (side // self._patch for side in sizes[0])
        apart = mx.pad(rows.reshape(height, -1, rows.shape[-1]), [(0, 0), (0, 1), (0, 0)])
        return Features(apart.reshape(-1, rows.shape[-1])[:-1])

    @property
    def _patch(self) -> int:
        """Side of a token in pixels."""
        side: int = self._config.vision_config.patch_size
        return side

    def _projected(self, rows: mx.array, sizes: Any) -> mx.array:
        projected: mx.array = self._seeing.multi_modal_projector(rows)
        return projected


class Mistral3(Pixtral):
    """Mistral 3: as Pixtral, but patches are merged, so a token covers a square of them."""

    @property
    def _patch(self) -> int:
        merged: int = self._config.spatial_merge_size
        return super()._patch * merged

    def _projected(self, rows: mx.array, sizes: Any) -> mx.array:
        projected: mx.array = self._seeing.multi_modal_projector(rows, sizes)
        return projected


def _shown(tokens: mx.array, seen: PixelInputs) -> mx.array:
    """Return a mask (1, tokens) of the tokens that belong to images. Placeholder ids alone are not sufficient, since a
    model may emit one as text."""
    shown = mx.zeros(tokens.shape, mx.bool_)
    for (first, last), _ in seen:
        shown[:, first:last] = True
    return shown


def _dtype(embedding: nn.Module) -> mx.Dtype:
    """Return the dtype of the embeddings that the layer produces, quantized or not."""
    row: mx.array = embedding(mx.array([0]))
    return row.dtype


@contextmanager
def _noted(tower: nn.Module, name: str, passed: list[mx.array]) -> Iterator[None]:
    """Record the outputs of the encoder's layers while the context is open. `name`: the encoder's attribute that holds
    the layers."""
    blocks = tower[name]
    tower[name] = noting(blocks, passed)
    try:
        yield
    finally:
        tower[name] = blocks


def _straight(position: int, tokens: int) -> mx.array:
    return mx.broadcast_to(mx.arange(position, position + tokens, dtype=mx.int32), (3, tokens))


def _grid(frames: int, rows: int, columns: int) -> mx.array:
    """Return the frame, row and column of each token, (3, tokens)."""
    axes = mx.meshgrid(*(mx.arange(size, dtype=mx.int32) for size in (frames, rows, columns)), indexing="ij")
    return mx.stack([axis.reshape(-1) for axis in axes])
