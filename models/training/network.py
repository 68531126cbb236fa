"""The network: mlx-lm's qwen3_5, built from our config, and patched to train fast.

This module uses these internals of mlx-lm: the class `qwen3_5.GatedDeltaNet` with its parameters
`A_log`, `dt_bias` and `conv1d`; that it finds its recurrence as `qwen3_5.gated_delta_update` and calls it as
`trainable_update` below is declared; and that its one convolution is depthwise, an `nn.Conv1d` not padded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5

from models.training.gated_delta import chunked_gated_delta
from models.training.plan import Size
from models.training.tokenizer import TURN_END, VOCABULARY

_RECURRENCE = "gated_delta_update"
_FULL: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "full_attention_interval": 2,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [3, 3, 2],
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.5,
    },
}
_SMALL = _FULL | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
}
_SIZES: dict[Size, dict[str, Any]] = {"full": _FULL, "small": _SMALL}


def config(size: Size) -> dict[str, Any]:
    """Return the contents of config.json."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "eos_token_id": TURN_END,
        "text_config": deepcopy(_SIZES[size]),
    }


def build(size: Size, seed: int) -> nn.Module:
    """Return a network with random weights."""
    mx.random.seed(seed)
    network = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config(size)))
    embedding = network.model.embed_tokens
    embedding.weight = 0.05 * mx.random.normal(embedding.weight.shape)
    for module in network.modules():
        if isinstance(module, qwen3_5.GatedDeltaNet):
            _initialize(module)
    return network


def _initialize(layer: nn.Module) -> None:
    """Set initial values for training: with mlx-lm's own the state decays within a few tokens."""
    heads = layer.num_v_heads
    layer.dt_bias = mx.linspace(-4, -1, heads)
    layer.A_log = mx.log(mx.random.uniform(0.5, 3.5, (heads,)))
    layer.conv1d.weight = 0.3 * mx.random.normal(layer.conv1d.weight.shape)


@contextmanager
def trainable() -> Iterator[None]:
    """While the context is open, every qwen3_5 accepts whole sequences only, and computes them in chunks and shifts."""
    with (
        _patched(qwen3_5, _RECURRENCE, trainable_update),
        _patched(nn.Conv1d, "__call__", shifted_depthwise),
        _uncompiled_on_cpu(),
    ):
        yield


@contextmanager
def _uncompiled_on_cpu() -> Iterator[None]:
    """Disable compilation on a CPU, where mlx-lm's compiled activations take twice as long as single operations."""
    if mx.default_device() != mx.cpu:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


@contextmanager
def _patched(owner: Any, name: str, value: object) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def trainable_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None,
    mask: mx.array | None,
    *,
    use_kernel: bool,
) -> tuple[mx.array, mx.array]:
    """Replace `gated_delta_update` of mlx-lm. Raises ValueError for a cache or a mask."""
    if state is not None or mask is not None:
        raise ValueError("Training runs whole sequences: no cache, no mask.")
    log_decay = -mx.exp(A_log) * nn.softplus(a + dt_bias)
    return chunked_gated_delta(q, k, v, log_decay, mx.sigmoid(b))


def shifted_depthwise(layer: nn.Conv1d, x: mx.array) -> mx.array:
    """Convolve [B, K - 1 + T, C] to [B, T, C]. MLX's own is slow on the CPU, and its gradient slower."""
    taps = layer.weight.shape[1]
    length = x.shape[1] - taps + 1
    shifted = (x[:, tap : tap + length] * layer.weight[:, tap, 0] for tap in range(taps))
    return sum(shifted, start=mx.array(0.0))
