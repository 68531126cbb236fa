"""Load the draft model whose drafts are verified, or share the one of SpecPrefill."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.checkpoint import read_json
from worker.engine.memory import MemoryModel
from worker.engine.model.calibration import calibrated
from worker.engine.model.drafting import Drafting, drafting
from worker.engine.model.load import Model, context_of, model_folder, refuse_undraftable
from worker.engine.model.profile import profile, weights_bytes
from worker.engine.model.same_tokens import tokens_read, why_not_same_tokens
from worker.engine.speculation.draft_rows import DraftNetwork
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import load_model, load_tokenizer
from worker.errors import CannotStart
from worker.outcomes import MAX_DRAFT


def with_drafter(model: Model, path_or_hub_id: str, specprefill_path_or_hub_id: str | None) -> Model:
    """Return the model with its draft model. Blocks; must run on the thread that will compute.
    `specprefill_path_or_hub_id`: of the model's SpecPrefill draft; if it is the same folder, the two share their
    weights. Raises `CannotStart` with the reason and what to do."""
    name = f"SLUICE_DRAFT_MODEL={path_or_hub_id}"
    refuse_undraftable(model, name)
    folder = model_folder(path_or_hub_id, name=name)
    is_shared = specprefill_path_or_hub_id is not None and _is_same(folder, specprefill_path_or_hub_id)
    try:
        return _with_drafter(model, folder, name, shared=model.draft.network if model.draft and is_shared else None)
    except (ValueError, OSError, KeyError, TypeError, ImportError, RuntimeError, AttributeError) as error:
        raise CannotStart(f"{name}: mlx-lm cannot load it: {error}") from error


def _with_drafter(model: Model, folder: Path, name: str, *, shared: nn.Module | None) -> Model:
    """`shared`: the network of this folder, if it is loaded already."""
    network, config = (
        (shared, read_json(folder, "config.json")) if shared is not None else load_model(folder, lazy=True)
    )
    tokens = MLXTokenizer(load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))).tokens
    found = profile(network, config)
    way = drafting(network, found.layers)
    if why_not := why_not_same_tokens(tokens_read(model), tokens, found.vocab) or _why_not(way):
        raise CannotStart(f"{name}: {why_not}")
    mx.eval(network.parameters())
    guessed = found.costs(weights_bytes=0 if shared is not None else weights_bytes(network))
    return added(model, network, calibrated(guessed, network, context_of(config)), way, config)


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
