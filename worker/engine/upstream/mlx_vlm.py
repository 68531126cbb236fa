"""Every name borrowed from mlx-vlm, and from Pillow, which it requires: an optional extra, imported only for a vision
model. `tests/engine/upstream/test_mlx_vlm.py` checks each. Written against mlx-vlm 0.7.10."""

from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import load_model, load_processor
from PIL.Image import new as new_image

__all__ = ["load_model", "load_processor", "make_prompt_cache", "new_image"]
