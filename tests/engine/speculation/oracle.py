"""Drafts by an oracle that errs at random, and forwards of any width."""

import random
from collections.abc import Mapping, Sequence

import pytest

from worker.engine.cache.recurrence import Recurrence, Replay, Stepping
from worker.engine.model.load import Model
from worker.engine.speculation import speculator
from worker.engine.speculation.speculator import Speculator
from worker.schedule.speculation.offer import MAX_DRAFT, DraftedRow, Offer
from worker.schedule.speculation.width import ForwardCosts

STEPPED = "rwkv7", "jamba", "recurrent_gemma", "mamba"  # their recurrences are not those that `Replay` records


class Oracle:
    """Proposer that knows each row's answer. Half of its drafts have a wrong token."""

    def __init__(self, answers: Mapping[str, Sequence[int]], seed: int = 0) -> None:
        self._answers, self._random = answers, random.Random(seed)
        self.offered = self.right = 0
        self.held = set[str]()

    def offer(self, row: DraftedRow) -> Offer | None:
        self.held.add(row.id)
        at = len(row.answer)
        draft = [*self._answers.get(row.id, ())[at : at + self._random.randrange(MAX_DRAFT + 1)]]
        if draft and self._random.random() < 0.5:
            draft[self._random.randrange(len(draft))] = self._random.randrange(10, 250)
        return Offer("oracle", tuple(draft), (0.5,) * len(draft)) if draft else None

    def kept(self, row: DraftedRow, offered: int, kept_tokens: int) -> None:
        self.offered += offered
        self.right += kept_tokens

    def forget(self, row: DraftedRow) -> None:
        self.held.discard(row.id)


def recurrence_of(model: Model) -> Recurrence:
    return (Stepping if model.fingerprint in STEPPED else Replay)(model.network)


def speculator_of(model: Model, oracle: Oracle) -> Speculator:
    eos_ids = model.tokenizer.eos_token_ids
    return Speculator([oracle], max_draft=MAX_DRAFT, recurrence=recurrence_of(model), eos_ids=eos_ids)


def verify_everything(patch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Have forwards of any width in place of the ones that pay."""
    rng = random.Random(seed)

    def choose(offers: Sequence[Offer | None], costs: ForwardCosts, cap: int, budget_s: float | None = None) -> int:
        return rng.choice([1, 2, 3, cap, cap, cap])

    patch.setattr(speculator, "choose_width", choose)
