"""Find and load the MTP head of a model, from the tensors that mlx-lm drops."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.engine.checkpoint import read_json, tensor_shapes
from worker.engine.speculation.mtp.head import MTPHead
from worker.engine.speculation.mtp.layouts import Layout, Shapes, Weights, joined_experts, layout_of, text_config
from worker.engine.speculation.mtp.trunk import Trunk
from worker.errors import CannotStart

_SAME = "model_type", "hidden_size", "vocab_size", "num_hidden_layers"  # config fields that head and trunk share
_INDEX = "model.safetensors.index.json"
_SHOWN = 3  # tensors that an error names


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The safetensors files of a folder, of which some hold a head."""

    folder: Path
    layout: Layout
    shapes: Shapes  # of all tensors in all files
    files: tuple[Path, ...]  # those that hold tensors of the head


def find_head(folder: Path, config: dict[str, Any]) -> HeadFiles | None:
    """Return where the head of this model is; None if the folder has none that can be loaded. Reads the headers of the
    weight files. Raises ValueError if one of them is not a safetensors file or is truncated."""
    layout = layout_of(config)
    if layout is None:
        return None
    by_file = {file: tensor_shapes(file) for file in sorted(folder.glob("*.safetensors"))}
    holding = tuple(file for file, shapes in by_file.items() if any(map(layout.rename, shapes)))
    shapes = {name: shape for each in by_file.values() for name, shape in each.items()}
    return HeadFiles(folder, layout, shapes, holding) if holding else None


def files_to_download(index: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Return the weight files that loading a head needs, of those that the index of a checkpoint lists."""
    layout, files = layout_of(config), dict[str, str](index.get("weight_map", {}))
    if layout is None:
        return []
    needed = {file for name, file in files.items() if layout.rename(name)}
    deciding = next((file for name, file in files.items() if layout.decides_norms(name)), None)
    return sorted(needed | ({deciding} if needed and deciding else set()))


def load_head(network: nn.Module, found: HeadFiles, config: dict[str, Any], *, name: str) -> MTPHead:
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


def refuse_other_model(head_config: dict[str, Any], config: dict[str, Any], *, name: str) -> None:
    """Raise `CannotStart` if a head with this config belongs to another model than the one that is served."""
    ours, theirs = text_config(config), text_config(head_config)
    for field in _SAME:
        if theirs.get(field) != ours.get(field):
            raise CannotStart(
                f"{name}: its MTP head belongs to another model ({field} is {theirs.get(field)}, and the served model "
                f"has {ours.get(field)}); give the original checkpoint of the served model."
            )


def _weights(found: HeadFiles) -> Weights:
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


def _quantize(head: MTPHead, weights: Weights, config: dict[str, Any], layout: Layout) -> None:
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
    more = f" and {len(first) - _SHOWN} more" if len(first) > _SHOWN else ""
    return ", ".join(first[:_SHOWN]) + more


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
