"""A draft model is loaded next to the model, shares its weights with SpecPrefill's, and its memory counts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import CONFIGS, FAMILIES, ONLY_MLX_VLM, build, model_of, write_checkpoint
from worker.engine.cache.recurrent import Replay
from worker.engine.model.drafter import with_drafter
from worker.engine.model.load import Model
from worker.engine.model.profile import weights_bytes
from worker.engine.prefill.scoring import with_draft
from worker.engine.vision.load import LanguageModel
from worker.errors import CannotStart


def model(name: str = "qwen3") -> Model:
    return model_of(build(FAMILIES[name]), FAMILIES[name])


def folder(tmp_path: Path, name: str = "qwen3_5", **changed: Any) -> str:
    return str(write_checkpoint({**CONFIGS[name], **changed}, tmp_path / name))


def test_a_draft_model_is_loaded_and_its_memory_counts(tmp_path: Path) -> None:
    before, path = model(), folder(tmp_path)
    after = with_drafter(before, path, None)
    assert after.drafter is not None
    assert isinstance(after.drafter.recurrence, Replay)
    assert after.costs.resident_bytes - before.costs.resident_bytes == weights_bytes(after.drafter.network)
    assert after.costs.drafter is not None
    assert (after.costs.drafter.max_draft, after.costs.drafter.draft_states) == (7, 2)
    rows = [[100, 300], [2000]]
    added = after.costs.working_bytes(rows) - before.costs.working_bytes(rows)
    assert added >= sum(after.costs.drafter.group_bytes(len(group), max(group))[0] for group in rows)


def test_one_folder_for_both_drafts_is_loaded_once(tmp_path: Path) -> None:
    path = folder(tmp_path)
    scoring = with_draft(model(), path)
    both = with_drafter(scoring, f"{path}/.", path)
    assert both.drafter is not None
    assert both.draft is not None
    assert both.drafter.network is both.draft.network
    assert both.costs.resident_bytes == scoring.costs.resident_bytes
    other = with_drafter(scoring, folder(tmp_path, "llama"), path)
    assert other.costs.resident_bytes > scoring.costs.resident_bytes


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    path = Path(folder(tmp_path))
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    (one, other), (first, second) = zip(*[*vocab.items()][300:302], strict=True)
    vocab |= {one: second, other: first}
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CannotStart, match=r"^SLUICE_DRAFT_MODEL=.*: Token \d+ is .* in its draft\. Choose a draft"):
        with_drafter(model(), str(path), None)


def test_a_draft_model_whose_rows_cannot_draft_together_is_refused(tmp_path: Path) -> None:
    path = str(write_checkpoint(FAMILIES["deepseek_v3"], tmp_path))
    with pytest.raises(CannotStart, match="its rows cannot draft together, since its latent attention"):
        with_drafter(model(), path, None)


def test_a_model_whose_rows_take_no_drafts_takes_no_draft_model(tmp_path: Path) -> None:
    served = model()
    served = replace(served, drafting=replace(served.drafting, max_draft=0, unsupported_reason="it has none"))
    with pytest.raises(CannotStart, match="take no drafts, since it has none; leave the setting out"):
        with_drafter(served, folder(tmp_path), None)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"SLUICE_DRAFT_MODEL=.*/none: there is no such folder"):
        with_drafter(model(), f"{tmp_path}/none", None)


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"^SLUICE_DRAFT_MODEL=.*: there is no config\.json"):
        with_drafter(model(), str(tmp_path), None)


def test_a_draft_model_may_be_of_a_family_that_only_mlx_vlm_has(tmp_path: Path) -> None:
    path = str(write_checkpoint(ONLY_MLX_VLM["k2_horizon"], tmp_path))
    drafter = with_drafter(model(), path, None).drafter
    assert drafter
    assert isinstance(drafter.network, LanguageModel)
