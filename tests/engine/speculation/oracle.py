"""Drafts by an oracle that errs at random, and forwards of any width."""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from worker.engine.cache.recurrent import Recurrence, Replay
from worker.engine.model.load import Model
from worker.engine.speculation import speculator
from worker.engine.speculation.draft_model import PrefillChunks
from worker.engine.speculation.offer import DraftedRow, Offer, Proposer
from worker.engine.speculation.speculator import Speculator
from worker.engine.speculation.tuning import MAX_PREFILL
from worker.engine.speculation.width import DraftBudget, ForwardCosts
from worker.outcomes import MAX_DRAFT

WRONG = range(10, 250)  # tokens that take the place of right ones


class Oracle(Proposer):
    """Proposer that knows each row's answer. Half of its drafts have a wrong token. What it offers follows from the
    seed, the row and the length of its answer."""

    def __init__(self, answers: Mapping[str, Sequence[int]], seed: int = 0, wrong: Sequence[int] = WRONG) -> None:
        self._answers, self._seed, self._wrong = answers, seed, wrong
        self.proposed = self.accepted = 0
        self.held = set[str]()

    def offer(self, row: DraftedRow) -> Offer | None:
        self.held.add(row.id)
        at = len(row.answer)
        rng = random.Random(f"{self._seed} {row.id} {at}")
        draft = [*self._answers.get(row.id, ())[at : at + rng.randrange(MAX_DRAFT + 1)]]
        if draft and rng.random() < 0.5:
            draft[rng.randrange(len(draft))] = rng.choice(self._wrong)
        return Offer("oracle", tuple(draft), (0.5,) * len(draft)) if draft else None

    def observe_accepted(self, row: DraftedRow, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted

    def forget(self, row: DraftedRow) -> None:
        self.held.discard(row.id)


def recurrence_of(model: Model) -> Recurrence:
    """Return how a worker advances the model's states. Rows of some models take no drafts in a worker, and do here."""
    drafting = model.drafting
    return drafting.recurrence(model.network) if drafting.max_draft else Replay(model.network)


def speculator_of(model: Model, oracle: Oracle) -> Speculator:
    eos_ids = model.tokenizer.eos_token_ids
    return Speculator([oracle], max_draft=MAX_DRAFT, recurrence=recurrence_of(model), eos_ids=eos_ids)


def any_width(seed: int = 0) -> Callable[..., int]:
    """Return a function that chooses widths at random, in place of `choose_width`."""
    rng = random.Random(seed)

    def choose(offers: Sequence[Offer | None], costs: ForwardCosts, cap: int, *_: object) -> int:
        return rng.choice([1, 2, 3, cap, cap, cap])

    return choose


def verify_everything(patch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Have forwards of any width in place of the ones that pay."""
    patch.setattr(speculator, "choose_width", any_width(seed))
    pause_nothing(patch)


def pause_nothing(patch: pytest.MonkeyPatch) -> None:
    """Let drafts lose any time: those of small models do, and how much depends on the machine."""
    patch.setattr(DraftBudget, "may_ask", True)
    patch.setattr(DraftBudget, "allows", lambda budget, source: True)


class Unhurried(PrefillChunks):
    """Prefill that takes no time, so that tests with a draft model do not depend on the speed of the machine."""

    def next_chunk(self, seconds: float) -> int:
        return MAX_PREFILL
