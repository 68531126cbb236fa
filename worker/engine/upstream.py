"""Every name that we borrow from mlx-lm. `tests/engine/test_upstream.py` holds each, so an upgrade that moves
one fails there and nowhere else. Written against mlx-lm 0.32.2."""

from mlx_lm.generate import (
    GenerationBatch,
    PromptProcessingBatch,
    StopSequences,
    TextStateMachine,
    generation_stream,
    make_text_state_machine,
)
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import _download, load_model, load_tokenizer

download = _download

__all__ = [
    "ArraysCache",
    "BPEStreamingDetokenizer",
    "CacheList",
    "GenerationBatch",
    "PromptProcessingBatch",
    "StopSequences",
    "TextStateMachine",
    "TokenizerWrapper",
    "apply_min_p",
    "apply_top_k",
    "apply_top_p",
    "download",
    "generation_stream",
    "greedy_sampler",
    "load_model",
    "load_tokenizer",
    "make_prompt_cache",
    "make_text_state_machine",
]
