"""The models that servers are compared with: two small ones for CPUs, and one for GPUs."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from models.random_checkpoints import hybrid_checkpoint, non_word_tokens, random_checkpoint


def dense(folder: Path) -> Path:
    """Write a dense model of 83 million parameters, and return the folder."""
    return random_checkpoint(folder, hidden=768, layers=12, kv_heads=4, never_sampled=non_word_tokens())


def hybrid(folder: Path) -> Path:
    """Write a model of 29 million parameters with one attention layer in four, and return the folder."""
    return hybrid_checkpoint(folder, never_sampled=non_word_tokens())


def large(folder: Path) -> Path:
    """Write a dense model of 1.4 billion parameters in bfloat16 (the layers of Qwen3-1.7B), and return the folder."""
    return random_checkpoint(folder, hidden=2048, layers=28, dtype=mx.bfloat16, never_sampled=non_word_tokens())


MODELS: dict[str, Callable[[Path], Path]] = {"plain": dense, "hybrid": hybrid, "large": large}
DEFAULT = ("plain", "hybrid")
