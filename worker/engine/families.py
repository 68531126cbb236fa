"""What differs between families of models that see: how an image becomes features, and how its tokens are computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.bidirectional import bidirectional
from worker.engine.encoding import Features, noting
from worker.engine.lent import lent
from worker.engine.scene import Family, Seen
from worker.schedule.sequence import Picture

MakeCache = Callable[[nn.Module], list[Any]]  # mlx-vlm's, for a language model of its own
MakeFamily = Callable[[nn.Module, nn.Module, MakeCache], Family]  # of what sees, and of its twin


class Qwen:
    """Qwen 2-VL to 3.5: an image's tokens have a row's and a column's position each, and all that follows it is nearer
    than it is far behind. mlx-lm's classes know no such positions, so mlx-vlm's compute these prompts."""

    whole = False

    def __init__(self, seeing: nn.Module, twin: nn.Module, make_cache: MakeCache) -> None:
        self._tower, self._language, self._make_cache = seeing.vision_tower, seeing.language_model, make_cache
        self._see = seeing.config.vision_config
        self._merge = self._see.spatial_merge_size
        self.placeholder: int = seeing.config.image_token_id

    def encode(self, seen: Any, passed: list[mx.array]) -> Features:
        with _noted(self._tower, "blocks", passed):
            put_out = self._tower(self._film(seen["pixel_values"]), mx.array(seen["image_grid_thw"]))
        return self._features(put_out)

    def _film(self, patches: Any) -> mx.array:
        """Of as many frames as the tower wants, all the same. A patch has one colour after the other, and of each one
        frame after the other."""
        colours = mx.array(patches).astype(self._tower.patch_embed.proj.weight.dtype)
        apart = colours.reshape(len(patches), self._see.in_channels, 1, -1)
        return mx.repeat(apart, self._see.temporal_patch_size, axis=2).reshape(len(patches), -1)

    def _features(self, put_out: Any) -> Features:
        return Features(put_out)

    def positions(self, tokens: int, pictures: Sequence[Picture]) -> tuple[mx.array | None, int]:
        parts, place, position = list[mx.array](), 0, 0
        for picture in pictures:
            start, end = picture.span
            parts.append(_straight(position, start - place))
            position += start - place
            ((frames, height, width),) = picture.seen["image_grid_thw"]
            rows, columns = int(height) // self._merge, int(width) // self._merge
            parts.append(position + _grid(int(frames), rows, columns))
            position, place = position + max(int(frames), rows, columns), end
        parts.append(_straight(position, tokens - place))
        position += tokens - place
        return mx.concatenate(parts, axis=1)[:, None], position - tokens

    def embeddings(self, tokens: mx.array) -> mx.array:
        rows: mx.array = self._language.model.embed_tokens(tokens)
        return rows

    def read(self, cache: list[Any], tokens: mx.array, rows: mx.array, positions: mx.array | None, seen: Seen) -> None:
        theirs = self._make_cache(self._language)
        with lent(cache, theirs):
            self._language(tokens, inputs_embeds=rows, cache=theirs, position_ids=positions, **self._deep(tokens, seen))

    def _deep(self, tokens: mx.array, seen: Seen) -> dict[str, Any]:
        return {}


class DeepQwen(Qwen):
    """Qwen 3 and later: what lies deeper in the vision tower is added behind the first layers."""

    def _features(self, put_out: Any) -> Features:
        rows, deepstack = put_out
        return Features(rows, tuple(deepstack))

    def _deep(self, tokens: mx.array, seen: Seen) -> dict[str, Any]:
        each = [features.deepstack for _, features in seen]
        if not any(each):
            return {}
        return {
            "visual_pos_masks": _shown(tokens, seen),
            "deepstack_visual_embeds": [mx.concatenate(list(layer)) for layer in zip(*each, strict=True)],
        }


class Plain:
    """An image's tokens are where they are, so mlx-lm's class can compute them: it is given the rows."""

    whole = False

    def __init__(self, seeing: nn.Module, twin: nn.Module, make_cache: MakeCache) -> None:
        self._seeing, self._tower, self._twin = seeing, seeing.vision_tower, twin
        self._embed, self._config = seeing.language_model.model.embed_tokens, seeing.config

    @property
    def placeholder(self) -> int:
        token: int = self._config.image_token_index
        return token

    def positions(self, tokens: int, pictures: Sequence[Picture]) -> tuple[mx.array | None, int]:
        return None, 0

    def embeddings(self, tokens: mx.array) -> mx.array:
        rows: mx.array = self._embed(tokens)
        return rows

    def read(self, cache: list[Any], tokens: mx.array, rows: mx.array, positions: mx.array | None, seen: Seen) -> None:
        self._twin(tokens, cache=cache, input_embeddings=rows)


class Gemma3(Plain):
    def encode(self, seen: Any, passed: list[mx.array]) -> Features:
        pixels = mx.array(seen["pixel_values"]).transpose(0, 2, 3, 1).astype(_dtype(self._embed))
        with _noted(self._tower.vision_model.encoder, "layers", passed):
            put_out, _, _ = self._tower(pixels, output_hidden_states=True)
        # The language model makes all rows larger by this; images shall stay as they are.
        return Features(self._seeing.multi_modal_projector(put_out)[0] / self._config.text_config.hidden_size**0.5)


class Gemma4(Plain):
    """Layers of the small models have inputs of their own, of the tokens' ids; and in the large ones an image's tokens
    see one another."""

    def __init__(self, seeing: nn.Module, twin: nn.Module, make_cache: MakeCache) -> None:
        super().__init__(seeing, twin, make_cache)
        seeing.audio_tower = seeing.embed_audio = None  # nobody sends sound, so they take no memory
        self._text = seeing.language_model.model
        self.whole = self._config.text_config.use_bidirectional_attention == "vision"

    @property
    def placeholder(self) -> int:
        token: int = self._config.image_token_id
        return token

    def encode(self, seen: Any, passed: list[mx.array]) -> Features:
        with _noted(self._tower.encoder, "layers", passed):
            put_out = self._tower(mx.array(seen["pixel_values"]))
        rows = self._seeing.embed_vision(put_out)[0].astype(_dtype(self._embed))
        return Features(rows / self._text.embed_scale)  # see Gemma 3

    def read(self, cache: list[Any], tokens: mx.array, rows: mx.array, positions: mx.array | None, seen: Seen) -> None:
        spans = [span for span, _ in seen] if self.whole else []
        self._twin(
            tokens,
            cache=bidirectional(cache, tokens.size, spans),
            input_embeddings=rows,
            per_layer_inputs=self._inputs(tokens, seen),
        )

    def _inputs(self, tokens: mx.array, seen: Seen) -> mx.array | None:
        """Of each layer. Images have those of token 0."""
        if not self._text.hidden_size_per_layer_input:
            return None
        inputs: mx.array = self._text.get_per_layer_inputs(mx.where(_shown(tokens, seen), 0, tokens))
        return inputs


class Pixtral(Plain):
    """Behind each row of an image but the last is a token that says so: it has a row here too, which is not used."""

    def encode(self, seen: Any, passed: list[mx.array]) -> Features:
        pixels, sizes = mx.array(seen["pixel_values"]).transpose(0, 2, 3, 1), seen["image_sizes"]
        with _noted(self._tower.vision_model.transformer, "layers", passed):
            *_, layers = self._tower(pixels, output_hidden_states=True, image_sizes=sizes)
        rows = self._projected(layers[self._config.vision_feature_layer][0], sizes)
        height, _ = (side // self._patch for side in sizes[0])
        apart = mx.pad(rows.reshape(height, -1, rows.shape[-1]), [(0, 0), (0, 1), (0, 0)])
        return Features(apart.reshape(-1, rows.shape[-1])[:-1])

    @property
    def _patch(self) -> int:
        """Pixels a side, of what a token stands for."""
        side: int = self._config.vision_config.patch_size
        return side

    def _projected(self, rows: mx.array, sizes: Any) -> mx.array:
        projected: mx.array = self._seeing.multi_modal_projector(rows)
        return projected


class Mistral3(Pixtral):
    @property
    def _patch(self) -> int:
        merged: int = self._config.spatial_merge_size
        return super()._patch * merged

    def _projected(self, rows: mx.array, sizes: Any) -> mx.array:
        projected: mx.array = self._seeing.multi_modal_projector(rows, sizes)
        return projected


def _shown(tokens: mx.array, seen: Seen) -> mx.array:
    """Which of these tokens are images'. Not any placeholder is: a model may say one, too."""
    shown = mx.zeros(tokens.shape, mx.bool_)
    for (first, last), _ in seen:
        shown[:, first:last] = True
    return shown


def _dtype(embedding: nn.Module) -> mx.Dtype:
    """Of the rows that it gives, quantized or not."""
    row: mx.array = embedding(mx.array([0]))
    return row.dtype


@contextmanager
def _noted(tower: nn.Module, name: str, passed: list[mx.array]) -> Iterator[None]:
    """Whoever calls the tower's layers, which it has by that name, has what they put out listed."""
    blocks = tower[name]
    tower[name] = noting(blocks, passed)
    try:
        yield
    finally:
        tower[name] = blocks


def _straight(position: int, tokens: int) -> mx.array:
    return mx.broadcast_to(mx.arange(position, position + tokens, dtype=mx.int32), (3, tokens))


def _grid(frames: int, rows: int, columns: int) -> mx.array:
    """(3, tokens): of each its frame, row and column."""
    axes = mx.meshgrid(*(mx.arange(size, dtype=mx.int32) for size in (frames, rows, columns)), indexing="ij")
    return mx.stack([axis.reshape(-1) for axis in axes])
