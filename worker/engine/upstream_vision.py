"""Every name that we borrow from mlx-vlm, and from Pillow, which comes with it: an extra, imported only where a model
sees. Held by `tests/engine/vision/test_upstream_vision.py`; written against mlx-vlm 0.7.10."""

from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import load_model, load_processor
from PIL.Image import new as new_image

__all__ = ["load_model", "load_processor", "make_prompt_cache", "new_image"]
