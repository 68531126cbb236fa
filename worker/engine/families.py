"""What differs between families of models that see: how an image becomes features, and how its tokens are computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.encoding import Features, noting
from worker.engine.lent import lent
from worker.engine.scene import Family, Seen
from worker.schedule.sequence import Picture

MakeCache = Callable[[nn.Module], list[Any]]  # mlx-vlm's, for a language model of its own


class Qwen:
    """Qwen 2-VL to 3.5: an image's tokens have a row's and a column's position each, and all that follows it is nearer
    than it is far behind. mlx-lm's classes know no such positions, so mlx-vlm's compute these prompts."""

    def __init__(self, seeing: nn.Module, make_cache: MakeCache) -> None:
        self._tower, self._language, self._make_cache = seeing.vision_tower, seeing.language_model, make_cache
        self._merge = seeing.config.vision_config.spatial_merge_size
        self.placeholder: int = seeing.config.image_token_id

    def encode(self, seen: Any, passed: list[mx.array]) -> Features:
        pixels = mx.array(seen["pixel_values"]).astype(self._tower.patch_embed.proj.weight.dtype)
        with _noted(self._tower, passed):
            put_out = self._tower(pixels, mx.array(seen["image_grid_thw"]))
        return self._features(put_out)

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
        rows, deep = put_out
        return Features(rows, tuple(deep))

    def _deep(self, tokens: mx.array, seen: Seen) -> dict[str, Any]:
        each = [features.deep for _, features in seen]
        if not any(each):
            return {}
        return {
            "visual_pos_masks": tokens == self.placeholder,
            "deepstack_visual_embeds": [mx.concatenate(list(layer)) for layer in zip(*each, strict=True)],
        }


@contextmanager
def _noted(tower: nn.Module, passed: list[mx.array]) -> Iterator[None]:
    """Whoever calls the tower's layers has what they put out listed."""
    blocks = tower.blocks
    tower.blocks = noting(blocks, passed)
    try:
        yield
    finally:
        tower.blocks = blocks


def _straight(position: int, tokens: int) -> mx.array:
    return mx.broadcast_to(mx.arange(position, position + tokens, dtype=mx.int32), (3, tokens))


def _grid(frames: int, rows: int, columns: int) -> mx.array:
    """(3, tokens): of each its frame, row and column."""
    axes = mx.meshgrid(*(mx.arange(size, dtype=mx.int32) for size in (frames, rows, columns)), indexing="ij")
    return mx.stack([axis.reshape(-1) for axis in axes])


# By the model_type of their configs.
FAMILIES: dict[str, Callable[[nn.Module, MakeCache], Family]] = {
    "qwen3_5": DeepQwen,
    "qwen3_5_moe": DeepQwen,
    "qwen3_vl": DeepQwen,
    "qwen3_vl_moe": DeepQwen,
    "qwen2_vl": Qwen,
    "qwen2_5_vl": Qwen,
}
