"""Decoder layers borrowed from mlx-lm, of which MTP heads are built. `tests/engine/upstream/test_decoder_layers.py`
checks them. Written against mlx-lm 0.32.2."""

from mlx_lm.models.glm4_moe import DecoderLayer as Glm4MoeLayer
from mlx_lm.models.glm4_moe import ModelArgs as Glm4MoeArgs
from mlx_lm.models.qwen3_5 import DecoderLayer as Qwen35Layer
from mlx_lm.models.qwen3_5 import TextModelArgs as Qwen35Args
from mlx_lm.models.qwen3_next import ModelArgs as Qwen3NextArgs
from mlx_lm.models.qwen3_next import Qwen3NextDecoderLayer as Qwen3NextLayer

__all__ = ["Glm4MoeArgs", "Glm4MoeLayer", "Qwen3NextArgs", "Qwen3NextLayer", "Qwen35Args", "Qwen35Layer"]
