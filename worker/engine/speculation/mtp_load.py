"""Load MTP heads: the layouts of their tensors in checkpoints, and of which layer each is built.

mlx-lm drops these tensors when it loads or converts a model. Its conversions have therefore lost them; the original
checkpoints have them."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.engine.checkpoint import read_json, tensor_shapes, text_config
from worker.engine.speculation.mtp import MTPHead, Trunk
from worker.engine.upstream.decoder_layers import (
    Glm4MoeArgs,
    Glm4MoeLayer,
    Qwen3NextArgs,
    Qwen3NextLayer,
    Qwen35Args,
    Qwen35Layer,
)
from worker.errors import CannotStart

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
class _Layout:
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


def layout_of(config: dict[str, Any]) -> _Layout | None:
    """Return the layout of a head of this model; None if such heads are not loaded."""
    text = text_config(config)
    family = str(text.get("model_type") or config.get("model_type")).removesuffix("_text")
    if family in ("qwen3_5", "qwen3_5_moe"):
        return _Layout(family, _behind_mtp, lambda: _qwen3_5(text), _raw_convolutions, _is_convolution)
    if family == "qwen3_next":
        return _Layout(family, _behind_mtp, lambda: _qwen3_next(text), _raw_experts, _is_first_expert)
    if family == "glm4_moe":
        last = int(text["num_hidden_layers"])
        return _Layout(family, lambda name: _glm_name(name, last), lambda: _glm4_moe(text), _never, _never)
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


_SAME = "model_type", "hidden_size", "vocab_size", "num_hidden_layers"  # config fields that head and trunk share
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _HeadFiles:
    """The safetensors files of a folder, of which some hold a head."""

    folder: Path
    layout: _Layout
    shapes: Shapes  # of all tensors in all files
    files: tuple[Path, ...]  # those that hold tensors of the head


def find_head(folder: Path, config: dict[str, Any]) -> _HeadFiles | None:
    """Return where the head of this model is; None if the folder has none that can be loaded. Reads the headers of the
    weight files. Raises ValueError if one of them is not a safetensors file or is truncated."""
    layout = layout_of(config)
    if layout is None:
        return None
    by_file = {file: tensor_shapes(file) for file in sorted(folder.glob("*.safetensors"))}
    holding = tuple(file for file, shapes in by_file.items() if any(map(layout.rename, shapes)))
    shapes = {name: shape for each in by_file.values() for name, shape in each.items()}
    return _HeadFiles(folder, layout, shapes, holding) if holding else None


def files_to_download(index: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Return the weight files that loading a head needs, of those that the index of a checkpoint lists."""
    layout, files = layout_of(config), dict[str, str](index.get("weight_map", {}))
    if layout is None:
        return []
    needed = {file for name, file in files.items() if layout.rename(name)}
    deciding = next((file for name, file in files.items() if layout.decides_norms(name)), None)
    return sorted(needed | ({deciding} if needed and deciding else set()))


def load_head(network: nn.Module, found: _HeadFiles, config: dict[str, Any], *, name: str) -> MTPHead:
    """Return the head with its weights, in the trunk's dtype. Lazy. `config`: of the model that the head belongs to.
    `name`: the folder's name in errors. Raises `CannotStart` if the head does not fit the network or is damaged."""
    weights = _weights(found)
    depths = {match[1] for each in weights if (match := re.match(r"layers\.(\d+)\.", each))}
    if len(depths) > 1:
        raise CannotStart(f"{name}: its MTP head has {len(depths)} layers; heads of a single layer are supported.")
    try:
        head = found.layout.build()
    except (TypeError, KeyError, ValueError) as error:
        raise CannotStart(f"{name}: config.json does not describe its MTP head: {error}") from error
    head.drop_unused(weights)
    _quantize(head, weights, config, found.layout)
    _refuse_misshapen(head, weights, name)
    head.load_weights([*weights.items()])
    _match_dtype(head, Trunk(network))
    return head


def head_of_layout(network: nn.Module, config: dict[str, Any]) -> MTPHead | None:
    """Return a head as a checkpoint of this model has it, unquantized, with weights that are not read; None if such
    heads are not loaded. Raises what its layer does if the config does not describe it. Lazy."""
    if (layout := layout_of(config)) is None:
        return None
    head = layout.build()
    _match_dtype(head, Trunk(network))
    return head


def refuse_other_model(head_config: dict[str, Any], config: dict[str, Any], *, name: str) -> None:
    """Raise `CannotStart` if a head with this config belongs to another model than the one that is served."""
    ours, theirs = text_config(config), text_config(head_config)
    for field in _SAME:
        if theirs.get(field) != ours.get(field):
            raise CannotStart(
                f"{name}: its MTP head belongs to another model ({field} is {theirs.get(field)}, and the served model "
                f"has {ours.get(field)}); give the original checkpoint of the served model."
            )


def _weights(found: _HeadFiles) -> Weights:
    """Return the head's tensors, named as `MTPHead` names them. Lazy."""
    rename = found.layout.rename
    loaded = {name: value for file in found.files for name, value in _tensors(file).items()}
    weights = joined_experts({ours: value for name, value in loaded.items() if (ours := rename(name))})
    if not found.layout.offset_norms(found.shapes):
        return weights
    return {name: value + 1.0 if _is_norm(name, value) else value for name, value in weights.items()}


def _tensors(file: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(file))
    assert isinstance(loaded, dict)  # the result of a safetensors file
    return loaded


def _is_norm(name: str, value: mx.array) -> bool:
    return value.ndim == 1 and "norm" in name and name.endswith(".weight")


def _quantize(head: MTPHead, weights: Weights, config: dict[str, Any], layout: _Layout) -> None:
    """Quantize the layers whose tensors are quantized, as the config says."""
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    if "group_size" not in quantization:
        return
    named = {layout.rename(f"{path}.weight"): each for path, each in quantization.items() if isinstance(each, dict)}
    own = {path.removesuffix(".weight"): each for path, each in named.items() if path}
    nn.quantize(
        head,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=lambda path, layer: (
            own.get(path, True) if hasattr(layer, "to_quantized") and f"{path}.scales" in weights else False
        ),
    )


def _refuse_misshapen(head: MTPHead, weights: Weights, name: str) -> None:
    expected = {path: value.shape for path, value in tree_flatten(head.parameters())}
    shapes = {path: value.shape for path, value in weights.items()}
    if missing := expected.keys() - shapes.keys():
        raise CannotStart(f"{name}: its MTP head is incomplete, without {_listed(missing)}; fetch all of its files.")
    if unknown := shapes.keys() - expected.keys():
        raise CannotStart(f"{name}: its MTP head has tensors that its layout does not have: {_listed(unknown)}.")
    if wrong := next((path for path in expected if expected[path] != shapes[path]), None):
        raise CannotStart(
            f"{name}: {wrong} of its MTP head has the shape {shapes[wrong]}, and config.json says {expected[wrong]}."
        )


def _listed(names: Iterable[str]) -> str:
    first = sorted(names)
    more = f" and {len(first) - 3} more" if len(first) > 3 else ""
    return ", ".join(first[:3]) + more


def _match_dtype(head: MTPHead, trunk: Trunk) -> None:
    """Convert the head to the dtype of the trunk's activations, without the bias of a router, which mlx-lm keeps in
    float32."""
    dtype = trunk.embed(mx.zeros((1, 1), mx.int32)).dtype
    bias = {name: value for name, value in tree_flatten(head.parameters()) if "e_score_correction_bias" in name}
    head.set_dtype(dtype)
    head.load_weights([*bias.items()], strict=False)


def with_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the folder's config; `config` if it has none, since heads are also distributed as single files."""
    return read_json(folder, "config.json") or config
