"""The draft model of SpecPrefill: loaded next to the model, and refused at start if the two do not match."""

from dataclasses import replace

import mlx.core as mx

from worker.engine.cache.segments import needs_states
from worker.engine.model.load import DraftModel, Model, context_of, model_folder
from worker.engine.model.profile import profile, weights_bytes
from worker.engine.model.same_tokens import tokens_read
from worker.engine.prefill.scoring import why_not_draft
from worker.engine.prefill.sparse import why_not_sparse
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import load_model, load_tokenizer
from worker.errors import CannotStart


def with_draft(model: Model, path_or_hub_id: str) -> Model:
    """Return the model with its draft loaded. Blocks; must run on the thread that will compute. Raises `CannotStart`
    with the reason and what to do."""
    setting = f"SLUICE_SPECPREFILL_DRAFT_MODEL={path_or_hub_id}"
    path = model_folder(path_or_hub_id, name=setting)
    try:
        draft, config = load_model(path, lazy=True)
        tokens = MLXTokenizer(load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))).tokens
        why_not = why_not_draft(tokens_read(model), tokens, draft)
        if why_not is None:
            mx.eval(draft.parameters())
            why_not = why_not_sparse(model.network, model.context)
    except (ValueError, OSError, KeyError, TypeError, ImportError, RuntimeError, AttributeError) as error:
        raise CannotStart(f"{setting}: mlx-lm cannot load it: {error}") from error
    if why_not:
        raise CannotStart(f"{setting}: {why_not}")
    draft_costs = profile(draft, config).costs(weights_bytes=weights_bytes(draft))
    costs = replace(model.costs, draft_bytes=draft_costs.weights_bytes, draft=draft_costs)
    return replace(model, draft=DraftModel(draft, context_of(config), needs_states(draft)), costs=costs)
