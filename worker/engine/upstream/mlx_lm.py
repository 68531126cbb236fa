"""Every name borrowed from mlx-lm. `tests/engine/upstream/test_mlx_lm.py` checks each, so an upgrade that moves one
fails there. Written against mlx-lm 0.32.2."""

from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _download, _get_classes, load_model, load_tokenizer

download, get_classes = _download, _get_classes

__all__ = [
    "DEFAULT_ALLOW_PATTERNS",
    "ArraysCache",
    "BPEStreamingDetokenizer",
    "CacheList",
    "KVCache",
    "RotatingKVCache",
    "TokenizerWrapper",
    "download",
    "generation_stream",
    "get_classes",
    "load_model",
    "load_tokenizer",
    "make_prompt_cache",
]
