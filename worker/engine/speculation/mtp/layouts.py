"""The layouts of MTP heads in checkpoints: how their tensors are named, and of which layer each is built.

mlx-lm drops these tensors when it loads or converts a model. Its conversions have therefore lost them; the original
checkpoints have them."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from worker.engine.speculation.mtp.head import MTPHead
from worker.engine.upstream.decoder_layers import (
    Glm4MoeArgs,
    Glm4MoeLayer,
    Qwen3NextArgs,
    Qwen3NextLayer,
    Qwen35Args,
    Qwen35Layer,
)

Weights = dict[str, mx.array]
Shapes = Mapping[str, tuple[int, ...]]  # of all tensors in the files, by their names there

_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(.+)")
_LAYER = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.(.+)")
_GLM_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}
_DEPTHS = "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout of MTP heads."""

    name: str
    rename: Callable[[str], str | None]  # a tensor's name in the files to its name in `MTPHead`; None: not of the head
    build: Callable[[], MTPHead]
    offset_norms: Callable[[Shapes], bool]  # True if the files keep the norms' weights minus one
    decides_norms: Callable[[str], bool]  # True for the names of the tensors that `offset_norms` reads


@dataclass(frozen=True, slots=True)
class HeadReport:
    """The MTP head of a model, by its config and the names of its tensors."""

    status: Literal["yes", "no", "without weights", "unsupported"]
    kind: str | None = None  # the layout, or why the head is not loaded


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that describes the language model."""
    text: dict[str, Any] = config.get("text_config") or config
    return text


def layout_of(config: dict[str, Any]) -> Layout | None:
    """Return the layout of a head of this model; None if such heads are not loaded."""
    text = text_config(config)
    family = str(text.get("model_type") or config.get("model_type")).removesuffix("_text")
    if family in ("qwen3_5", "qwen3_5_moe"):
        return Layout(family, _behind_mtp, lambda: _qwen3_5(text), _raw_convolutions, _is_convolution)
    if family == "qwen3_next":
        return Layout(family, _behind_mtp, lambda: _qwen3_next(text), _raw_experts, _is_first_expert)
    if family == "glm4_moe":
        last = int(text["num_hidden_layers"])
        return Layout(family, lambda name: _glm_name(name, last), lambda: _glm4_moe(text), _never, _never)
    return None


def report_head(config: dict[str, Any], names: Iterable[str]) -> HeadReport:
    """Report on the head of a model. `names`: of all tensors in its files."""
    layout, names = layout_of(config), [*names]
    text = text_config(config)
    if layout and any(layout.rename(name) for name in names):
        return HeadReport("yes", layout.name)
    present = any(_is_of_any_head(name, text) for name in names)
    if present:
        return HeadReport("unsupported", _why_unsupported(text))
    declared = any(place.get(depth) for place in (config, text) for depth in _DEPTHS)
    return HeadReport("without weights" if declared else "no")


def _why_unsupported(text: dict[str, Any]) -> str:
    family = text.get("model_type")
    if text.get("kv_lora_rank"):
        return f"{family}: its attention is latent (MLA), for which no head is loaded"
    return f"{family}: heads of this layout are not loaded"


def _is_of_any_head(name: str, text: dict[str, Any]) -> bool:
    match = _LAYER.match(name)
    return "mtp" in name or bool(match and int(match[1]) >= text.get("num_hidden_layers", 1 << 30))


def _behind_mtp(name: str) -> str | None:
    own = name.removeprefix("language_model.").removeprefix("model.")
    return own.removeprefix("mtp.") if own.startswith("mtp.") else None


def _glm_name(name: str, last: int) -> str | None:
    """`last`: the number of layers of the trunk, after which the head is numbered."""
    match = _LAYER.match(name)
    if match is None or int(match[1]) < last:
        return None
    layer, own = int(match[1]) - last, match[2]
    prefix = next((prefix for prefix in _GLM_NAMES if own.startswith(f"{prefix}.")), None)
    if prefix is None:
        return f"layers.{layer}.{own}"
    return _GLM_NAMES[prefix] + own.removeprefix(prefix)


def _qwen3_5(text: dict[str, Any]) -> MTPHead:
    args = Qwen35Args.from_dict({**text, "full_attention_interval": 1})
    return MTPHead(Qwen35Layer(args, 0), args.hidden_size, args.rms_norm_eps)


def _qwen3_next(text: dict[str, Any]) -> MTPHead:
    args = Qwen3NextArgs.from_dict({**text, "full_attention_interval": 1, "mlp_only_layers": []})
    return MTPHead(Qwen3NextLayer(args, args.decoder_sparse_step - 1), args.hidden_size, args.rms_norm_eps)


def _glm4_moe(text: dict[str, Any]) -> MTPHead:
    args = Glm4MoeArgs.from_dict(text)
    head = MTPHead(Glm4MoeLayer(args, args.num_hidden_layers), args.hidden_size, args.rms_norm_eps)
    head.add_own_vocabulary(args.vocab_size)
    return head


# As mlx-lm's `sanitize` decides it for the norms of the trunk.


def _is_convolution(name: str) -> bool:
    return "conv1d.weight" in name


def _raw_convolutions(shapes: Shapes) -> bool:
    return any(_is_convolution(name) and shape[-1] != 1 for name, shape in shapes.items())


def _is_first_expert(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith(".mlp.experts.0.up_proj.weight")


def _raw_experts(shapes: Shapes) -> bool:
    return any(map(_is_first_expert, shapes))


def _never(_: object) -> bool:
    return False


def joined_experts(weights: Weights) -> Weights:
    """Return the weights with the experts of each layer in one tensor, as mlx-lm's layers hold them."""
    experts: dict[str, dict[int, mx.array]] = {}
    joined = dict[str, mx.array]()
    for name, value in weights.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.switch_mlp.{match[3]}", {})[int(match[2])] = value
        else:
            joined |= _renamed_stack(name, value)
    return joined | {name: mx.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}


def _renamed_stack(name: str, value: mx.array) -> Weights:
    """Return the tensor under mlx-lm's names, if it holds all experts of a layer; else unchanged."""
    prefix, is_stack, projection = name.partition(".experts.")
    if not is_stack:
        return {name: value}
    if projection == "gate_up_proj":
        gate, up = mx.split(value, 2, axis=-2)
        return {f"{prefix}.switch_mlp.gate_proj.weight": gate, f"{prefix}.switch_mlp.up_proj.weight": up}
    return {f"{prefix}.switch_mlp.{projection.removesuffix('.weight')}.weight": value}
