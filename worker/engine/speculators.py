"""The speculator of a model's rows."""

from worker.engine.model.load import Model
from worker.engine.speculation.copies import CopyProposer
from worker.engine.speculation.draft_model import DraftModelProposer
from worker.engine.speculation.forced import GrammarProposer
from worker.engine.speculation.mtp.proposer import HeadProposer
from worker.engine.speculation.speculator import Speculator


def speculator_of(model: Model) -> Speculator:
    """Return the speculator of an engine for this model, which offers what a grammar leaves no choice about, copies of
    prompt, answer and prediction, and drafts of the model's MTP head and of its draft model. It drafts nothing if the
    model's rows take no drafts."""
    drafting = model.drafting
    return Speculator(
        [CopyProposer()],
        every_step=[GrammarProposer()],
        head=HeadProposer(model.head) if model.head else None,
        draft=DraftModelProposer(model.drafter) if model.drafter else None,
        max_draft=drafting.max_draft,
        recurrence=drafting.recurrence(model.network),
        eos_ids=model.tokenizer.eos_token_ids,
    )
