"""Load what drafts for a model: its MTP head, and a draft model, which reads the same tokens."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn

from worker.engine.checkpoint import read_config, read_json, tensor_names, told_as
from worker.engine.memory import KVLayers, MemoryModel
from worker.engine.model.calibration import calibrated
from worker.engine.model.load import (
    Model,
    OnLoaded,
    context_of,
    load_weights,
    model_folder,
    open_text,
    refuse_undraftable,
)
from worker.engine.model.profile import Drafting, drafting, profile, weights_bytes
from worker.engine.speculation.draft_model import DraftNetwork
from worker.engine.speculation.mtp import Head, Trunk, entry_shape
from worker.engine.speculation.mtp_load import (
    files_to_download,
    find_head,
    head_of_layout,
    load_head,
    refuse_other_model,
    report_head,
    with_config,
)
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import load_tokenizer
from worker.errors import CannotStart
from worker.outcomes import MAX_DRAFT

logger = logging.getLogger("sluice.engine")

_INDEX = "model.safetensors.index.json"


def with_head(
    model: Model, path_or_hub_id: str, head_path_or_hub_id: str | None, on_loaded: OnLoaded | None = None
) -> Model:
    """Return the model with its MTP head. Blocks; must run on the thread that will compute. `path_or_hub_id`: of the
    model. `head_path_or_hub_id`: of a checkpoint with the head. If it is None, a head in the model's own folder is
    loaded, and one that cannot be loaded is left out with a warning; else it raises `CannotStart` with the reason and
    what to do."""
    folder = model_folder(path_or_hub_id, name=f"SLUICE_MODEL={path_or_hub_id}")
    config = read_json(folder, "config.json")
    if head_path_or_hub_id is not None:
        name = f"SLUICE_MTP_MODEL={head_path_or_hub_id}"
        refuse_undraftable(model, name)
        return _loaded(model, config, _head_folder(head_path_or_hub_id, config, name), name, on_loaded)
    if not model.drafting.max_draft:
        return model
    try:
        return _loaded(model, config, folder, path_or_hub_id, on_loaded) if find_head(folder, config) else model
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


def _loaded(model: Model, config: dict[str, Any], folder: Path, name: str, on_loaded: OnLoaded | None) -> Model:
    head_config = with_config(folder, config)
    refuse_other_model(head_config, config, name=name)
    try:
        found = find_head(folder, config)
        if found is None:
            raise CannotStart(f"{name}: {_why_none(folder, head_config)}")
        network = load_head(model.network, found, head_config, name=name)
        load_weights(network, on_loaded)
    except (ValueError, OSError, RuntimeError) as error:
        raise CannotStart(f"{name}: its MTP head cannot be loaded: {error}") from error
    head = Head(network, Trunk(model.network))
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


def costs_with_head(network: nn.Module, costs: MemoryModel, config: dict[str, Any], folder: Path | None) -> MemoryModel:
    """Return the memory model of a network with its MTP head, or `costs` if none is loaded. Lazy: reads no weights.
    `folder`: with the head; None if its files are not here, and then it counts as unquantized. Raises `CannotStart`,
    ValueError, OSError, and for a config that does not describe the head what its layer raises."""
    if folder is None:
        head = head_of_layout(network, config)
    else:
        found = find_head(folder, config)
        head = load_head(network, found, with_config(folder, config), name=str(folder)) if found else None
    return with_head_costs(costs, Head(head, Trunk(network))) if head else costs


def tokens_read(model: Model) -> list[str]:
    """Return the model's tokens by id, without the image placeholder, which a draft model does not read."""
    tokens = MLXTokenizer(model.tokenizer).tokens
    if model.vision:
        tokens[model.vision.family.placeholder] = ""
    return tokens


def why_not_same_tokens(target: Sequence[str], draft: Sequence[str], vocab: int) -> str | None:
    """Return why a draft model does not read the model's tokens, and what to do; None if it does. `target` and `draft`:
    tokens of the model and of its draft by id, "" for ids without a token. `vocab`: number of the draft's logits,
    unnamed tokens included."""
    why_not = _difference(target, draft, vocab)
    return why_not and f"{why_not}. Choose a draft of the model's own family, which shares its tokens."


def _difference(target: Sequence[str], draft: Sequence[str], vocab: int) -> str | None:
    for token, (name, draft_name) in enumerate(zip(target, draft, strict=False)):
        if name and draft_name and name != draft_name:
            return f"Token {token} is {name!r} in the model and {draft_name!r} in its draft"
    unknown = (token for token, name in enumerate(target) if name and token >= vocab)
    if (first := next(unknown, None)) is not None:
        return f"The draft has {vocab:,} tokens, and the model's token {first} is {target[first]!r}"
    return None


def with_drafter(
    model: Model, path_or_hub_id: str, specprefill_path_or_hub_id: str | None, on_loaded: OnLoaded | None = None
) -> Model:
    """Return the model with its draft model. Blocks; must run on the thread that will compute.
    `specprefill_path_or_hub_id`: of the model's SpecPrefill draft; if it is the same folder, the two share their
    weights. Raises `CannotStart` with the reason and what to do."""
    name = f"SLUICE_DRAFT_MODEL={path_or_hub_id}"
    refuse_undraftable(model, name)
    folder = model_folder(path_or_hub_id, name=name)
    is_shared = specprefill_path_or_hub_id is not None and _is_same(folder, specprefill_path_or_hub_id)
    read_config(folder, name)
    with told_as(lambda reason: f"{name}: mlx-lm cannot load it: {reason}"):
        shared = model.draft.network if model.draft and is_shared else None
        return _with_drafter(model, folder, name, on_loaded, shared=shared)


def _with_drafter(
    model: Model, folder: Path, name: str, on_loaded: OnLoaded | None, *, shared: nn.Module | None
) -> Model:
    """`shared`: the network of this folder, if it is loaded already."""
    network, config = (shared, read_json(folder, "config.json")) if shared is not None else _opened(folder)
    tokens = MLXTokenizer(load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))).tokens
    found = profile(network, config)
    way = drafting(network, found.layers)
    if why_not := why_not_same_tokens(tokens_read(model), tokens, found.vocab) or _why_not(way):
        raise CannotStart(f"{name}: {why_not}")
    load_weights(network, on_loaded)
    guessed = found.costs(weights_bytes=0 if shared is not None else weights_bytes(network))
    return added(model, network, calibrated(guessed, network, context_of(config)), way, config)


def _opened(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    network, config, _ = open_text(folder, trusted=False)
    return network, config


def added(model: Model, network: nn.Module, costs: MemoryModel, way: Drafting, config: dict[str, Any]) -> Model:
    """Return the model with this draft model. `costs`: of the draft model, without weights that it shares. `way`: how
    its own rows take several tokens."""
    drafter = DraftNetwork(network, way.recurrence(network), context_of(config))
    states = drafter.recurrence.held_states(1 + MAX_DRAFT)
    drafter_costs = replace(costs, max_draft=MAX_DRAFT, draft_states=states)
    draft_bytes = model.costs.draft_bytes + costs.weights_bytes
    return replace(model, drafter=drafter, costs=replace(model.costs, draft_bytes=draft_bytes, drafter=drafter_costs))


def _is_same(folder: Path, path_or_hub_id: str) -> bool:
    other = model_folder(path_or_hub_id, name=f"SLUICE_SPECPREFILL_DRAFT_MODEL={path_or_hub_id}")
    return folder.resolve() == other.resolve()


def _why_not(way: Drafting) -> str | None:
    """Return why the rows of a draft model cannot be computed together; None if they can."""
    if way.max_draft:
        return None
    return f"its rows cannot draft together, since {way.unsupported_reason}. Choose another draft model."
