"""The proposers, each alone and together as a worker runs them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal
from unittest.mock import patch

from worker.engine.model.load import Model
from worker.engine.speculation import speculator
from worker.engine.speculation.copies import CopyProposer
from worker.engine.speculation.draft_model import DraftModelProposer
from worker.engine.speculation.forced import GrammarProposer
from worker.engine.speculation.mtp import HEAD_RATES, HeadProposer
from worker.engine.speculation.offer import DraftedRow, Offer, Proposer
from worker.engine.speculation.speculator import Speculator
from worker.engine.speculation.width import DraftBudget
from worker.engine.thread import speculator_of
from worker.outcomes import PREDICTION


class PredictionProposer(CopyProposer):
    """Offers what continues the prediction, and no copies of prompt or answer."""

    def offer(self, row: DraftedRow) -> Offer | None:
        """Return a draft from the prediction, or None."""
        offered = super().offer(row)
        return offered if offered and offered.kind == PREDICTION else None


class IdleProposer(Proposer):
    """Never offers a draft."""

    def offer(self, row: DraftedRow) -> None:
        """Return None."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Sources of the drafts of a run."""

    about: str
    speculator: Callable[[Model], Speculator]
    predicted: bool = False  # requests have their predictions
    with_head: bool = False  # if the model has one
    with_drafter: bool = False  # likewise
    needs: Literal["head", "drafter"] | None = None
    depth: int | None = None  # tokens of every draft; None: chosen by what pays

    def model(self, model: Model) -> Model:
        """Return the model with its MTP head and its draft model, if they take part: a head makes forwards a little
        dearer."""
        head, drafter = model.head if self.with_head else None, model.drafter if self.with_drafter else None
        return replace(model, head=head, drafter=drafter)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Let the speculator choose the lengths of its drafts in the block; or fix them, if they are fixed, whatever
        these drafts lose."""
        if self.depth is None:
            yield
            return
        width = 1 + self.depth
        with (
            patch.object(speculator, "choose_width", lambda offers, *_, **__: width if any(offers) else 1),
            patch.object(DraftBudget, "may_ask", new=True),
            patch.object(DraftBudget, "allows", lambda *_: True),
        ):
            yield


def _alone(
    proposers: Sequence[Proposer],
    model: Model,
    *,
    head: HeadProposer | None = None,
    draft: DraftModelProposer | None = None,
) -> Speculator:
    return Speculator(
        proposers,
        head=head,
        draft=draft,
        max_draft=model.drafting.max_draft,
        recurrence=model.drafting.recurrence(model.network),
        eos_ids=model.tokenizer.eos_token_ids,
    )


def _head_alone(model: Model) -> Speculator:
    assert model.head is not None, "cases of models without a head are left out"
    return _alone([], model, head=HeadProposer(model.head))


def _drafter_alone(model: Model) -> Speculator:
    assert model.drafter is not None, "cases of models without a draft model are left out"
    return _alone([], model, draft=DraftModelProposer(model.drafter))


PROPOSERS = {
    "idle": Drafts(
        "none is ever offered: what it costs that drafts are possible", lambda model: _alone([IdleProposer()], model)
    ),
    "copies": Drafts("what has followed the row's ending before", lambda model: _alone([CopyProposer()], model)),
    "prediction": Drafts(
        "the text that the client expects", lambda model: _alone([PredictionProposer()], model), predicted=True
    ),
    "grammar": Drafts("what a schema leaves no choice about", lambda model: _alone([GrammarProposer()], model)),
    "mtp": Drafts("the model's multi-token-prediction head", _head_alone, with_head=True, needs="head"),
    "mtp-fixed": Drafts(
        f"the same, with {len(HEAD_RATES)} tokens in every draft",
        _head_alone,
        with_head=True,
        needs="head",
        depth=len(HEAD_RATES),
    ),
    "draft": Drafts("a draft model", _drafter_alone, with_drafter=True, needs="drafter"),
    "all": Drafts(
        "all proposers of a worker together", speculator_of, predicted=True, with_head=True, with_drafter=True
    ),
}
