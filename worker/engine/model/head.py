"""Load the MTP head of a model, from its own folder or from another checkpoint's."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from worker.engine.checkpoint import read_json, tensor_names
from worker.engine.memory import KVLayers, MemoryModel
from worker.engine.model.load import Model, model_folder, refuse_undraftable
from worker.engine.model.profile import weights_bytes
from worker.engine.speculation.mtp.head import Head, entry_shape
from worker.engine.speculation.mtp.layouts import report_head
from worker.engine.speculation.mtp.load import files_to_download, find_head, load_head, refuse_other_model, with_config
from worker.engine.speculation.mtp.trunk import RecordingTrunk
from worker.errors import CannotStart

logger = logging.getLogger("sluice.engine")

_INDEX = "model.safetensors.index.json"


def with_head(model: Model, path_or_hub_id: str, head_path_or_hub_id: str | None) -> Model:
    """Return the model with its MTP head. Blocks; must run on the thread that will compute. `path_or_hub_id`: of the
    model. `head_path_or_hub_id`: of a checkpoint with the head. If it is None, a head in the model's own folder is
    loaded, and one that cannot be loaded is left out with a warning; else it raises `CannotStart` with the reason and
    what to do."""
    folder = model_folder(path_or_hub_id, name=f"SLUICE_MODEL={path_or_hub_id}")
    config = read_json(folder, "config.json")
    if head_path_or_hub_id is not None:
        name = f"SLUICE_MTP_MODEL={head_path_or_hub_id}"
        refuse_undraftable(model, name)
        return _loaded(model, config, _head_folder(head_path_or_hub_id, config, name), name)
    if not model.drafting.max_draft:
        return model
    try:
        return _loaded(model, config, folder, path_or_hub_id) if find_head(folder, config) else model
    except (CannotStart, ValueError) as error:
        logger.warning("the model's MTP head is not used: %s", error)
        return model


def _head_folder(path_or_hub_id: str, config: dict[str, Any], name: str) -> Path:
    """Return the local folder of a checkpoint; of one on a hub, only the files that the head needs are downloaded."""
    if Path(path_or_hub_id).expanduser().is_dir():
        return model_folder(path_or_hub_id, name=name)
    folder = model_folder(path_or_hub_id, name=name, only=["config.json", _INDEX])
    if not (folder / _INDEX).is_file():
        return model_folder(path_or_hub_id, name=name, only=["config.json", "*.safetensors"])
    files = files_to_download(json.loads((folder / _INDEX).read_text("utf-8")), config)
    return model_folder(path_or_hub_id, name=name, only=["config.json", _INDEX, *files])


def _loaded(model: Model, config: dict[str, Any], folder: Path, name: str) -> Model:
    head_config = with_config(folder, config)
    refuse_other_model(head_config, config, name=name)
    try:
        found = find_head(folder, config)
        if found is None:
            raise CannotStart(f"{name}: {_why_none(folder, head_config)}")
        network = load_head(model.network, found, head_config, name=name)
        mx.eval(network.parameters())
    except (ValueError, OSError, RuntimeError) as error:
        raise CannotStart(f"{name}: its MTP head cannot be loaded: {error}") from error
    head = Head(network, RecordingTrunk(model.network))
    return replace(model, head=head, costs=with_head_costs(model.costs, head))


def _why_none(folder: Path, config: dict[str, Any]) -> str:
    names = [name for file in folder.glob("*.safetensors") for name in tensor_names(file)]
    kind = report_head(config, names).kind
    if kind:
        return f"its MTP head is not supported ({kind}); leave the setting out."
    return "it has no MTP head; give the folder of the original checkpoint."


def with_head_costs(costs: MemoryModel, head: Head) -> MemoryModel:
    """Return the memory model of a model with this head: its weights, an attention layer more for each row, and the
    hidden states of a chunk."""
    keys, values = entry_shape(head)
    token_bytes = keys.nbytes + values.nbytes
    hidden_bytes = head.network.fc.weight.shape[0] * keys.dtype.size
    full = next((kind for kind in costs.kv_layers if kind.window is None), KVLayers(0, 0))
    others = tuple(kind for kind in costs.kv_layers if kind is not full)
    more = KVLayers(full.token_bytes + token_bytes, max(full.layer_bytes, token_bytes))
    return replace(
        costs,
        weights_bytes=costs.weights_bytes + weights_bytes(head.network),
        kv_layers=(more, *others),
        chunk_token_bytes=costs.chunk_token_bytes + hidden_bytes,
    )
