"""Every name borrowed from mlx-vlm, and from Pillow, which it requires: an optional extra, imported only for images
and for families that mlx-lm does not have. `tests/engine/upstream/test_mlx_vlm.py` checks each. Written against mlx-vlm
0.7.10."""

from mlx_vlm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from mlx_vlm.utils import get_model_and_args, get_model_type, load_model, load_processor, update_module_configs
from PIL.Image import new as new_image

__all__ = [
    "ArraysCache",
    "CacheList",
    "KVCache",
    "RotatingKVCache",
    "get_model_and_args",
    "get_model_type",
    "load_model",
    "load_processor",
    "make_prompt_cache",
    "new_image",
    "update_module_configs",
]
