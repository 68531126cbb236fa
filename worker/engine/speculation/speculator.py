"""Decide which drafts a group of rows verifies in its next forward, and report to their proposers what was accepted."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from worker.engine.cache.recurrent import NoRecurrence, Recurrence
from worker.engine.memory import CHUNK, MemoryModel
from worker.engine.speculation.draft_model import DraftModelProposer
from worker.engine.speculation.inputs import RowInput, SpeculatingRow, undelivered, view
from worker.engine.speculation.mtp.prompt import PromptEntries
from worker.engine.speculation.mtp.proposer import FedTokens, HeadProposer
from worker.engine.speculation.networks import Ahead, Drafting, Networks
from worker.engine.speculation.offer import DraftedRow, Offer
from worker.engine.speculation.positions import allowed
from worker.engine.speculation.proposer import Proposer, SteppedProposer
from worker.engine.speculation.spending import Spending
from worker.engine.speculation.width import Costs, ForwardCosts, choose_width, expected_tokens
from worker.outcomes import Speculated


@dataclass(frozen=True, slots=True)
class _Proposal:
    """An offer, and how many tokens the row's answer had when it was made."""

    proposer: Proposer
    offer: Offer
    answered: int


class Speculator:
    """The drafts of all rows. For the engine's thread."""

    def __init__(
        self,
        proposers: Sequence[Proposer] = (),
        *,
        every_step: Sequence[Proposer] = (),
        head: HeadProposer | None = None,
        draft: DraftModelProposer | None = None,
        max_draft: int = 0,
        recurrence: Recurrence | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        """`every_step`: proposers that are asked in every step, since their drafts begin without warning and are mostly
        right; the others are asked less often while that does not pay. `head`, `draft`: proposers more, for all rows of
        a group at once. `max_draft`: most tokens of a draft; 0: no drafts. `recurrence`: see `Recurrence`. `eos_ids`:
        tokens that end an answer; none is fed as a part of a draft, so no state runs past one."""
        networks = [network for network in (head, draft) if network]
        every = [*every_step, *proposers, *networks]
        self._costs = ForwardCosts()
        self.spending = Spending(self._costs, len(every))
        self._every_step: Sequence[Proposer] = every_step if max_draft else ()
        self._proposers: Sequence[Proposer] = [*every_step, *proposers] if max_draft else ()
        self._networks = Networks(networks if max_draft else (), self._costs, self._width, self.spending)
        self.max_draft = max_draft if every else 0
        self.recurrence = recurrence or NoRecurrence()
        self.eos_ids = frozenset(eos_ids)
        self._offered: dict[str, _Proposal] = {}  # by row: the last offer
        self._proposals: dict[str, _Proposal] = {}  # by row: the draft under verification
        self._stepped = [each for each in self._proposers if isinstance(each, SteppedProposer)]

    @property
    def uses_head(self) -> bool:
        """True if drafts of an MTP head are offered, which needs the hidden states of all forwards."""
        return self._networks.have_head

    def reserving(self, costs: MemoryModel) -> MemoryModel:
        """Return the memory model with what drafts need."""
        states = self.recurrence.held_states(1 + self.max_draft)
        return replace(costs, max_draft=self.max_draft, draft_states=states)

    def plain_s(self, rows: int) -> float | None:
        """Return the expected seconds of a step without drafts, or None before any was measured, or if there are no
        drafts."""
        return self._costs.seconds(rows, 1) if self._costs.measured else None

    def knows_plain(self, rows: int) -> bool:
        """Return True unless plain steps of this number of rows must be measured before drafts are verified."""
        return self._costs.knows_plain(rows)

    def widest_more_s(self, rows: int) -> float:
        """Return the expected seconds that a forward with the longest drafts takes more than a plain one; 0 before any
        forward was measured."""
        return (
            self._costs.seconds(rows, 1 + self.max_draft) - self._costs.seconds(rows, 1)
            if self._costs.measured
            else 0.0
        )

    def usual_s(self, rows: int, width: int, drafting: Drafting | None) -> float:
        """Return the expected seconds of a forward and of drafting for it; infinite if they are unknown."""
        if not self._costs.measured:
            return inf
        return self._costs.seconds(rows, width) + (self._networks.usual_s(drafting) if drafting else 0.0)

    def begin_step(self, rows: Iterable[SpeculatingRow]) -> None:
        """Let proposers do their work of each step for these rows, whether or not they are asked in it."""
        taking = [row for row in rows if row.request.max_draft != 0 and not row.recomputed]
        self.spending.begin_step(self._stepped, taking)

    def ask_for_drafts(
        self, rows: Sequence[SpeculatingRow], *, all_proposers: bool = True, more_s: float = inf
    ) -> bool:
        """Ask each proposer for a draft of each row, at most once, and hold the best for `drafts`. Return True if a
        forward of these rows is expected to gain from them. If the rows' next inputs are not known yet, the drafts must
        begin with them. `all_proposers`: not only those of every step. `more_s`: most seconds that the forward may take
        more than a plain one."""
        proposers = self.spending.allowed(self._proposers if all_proposers else self._every_step)
        networks = self._networks if all_proposers and self._networks.allowed else None
        if not proposers and not networks:
            return False
        offered = self._ask(rows, proposers)
        if not offered and not networks:
            return False
        ahead = [Ahead(row, self._most(row), self._foreseen(row, offered)) for row in rows]
        if networks:
            return networks.ask_for_drafts(ahead, more_s)
        known = [each.known for each in ahead]
        return any(known) and self._width(known, self._costs, more_s) > 1

    def _foreseen(self, row: SpeculatingRow, offered: Mapping[str, _Proposal]) -> Offer | None:
        """Return what is likely to be offered once the row's next input is known."""
        known = offered[row.id].offer if row.id in offered and self._most(row) else None
        return _after_input(known) if known and not row.last_unfed else known

    def _ask(self, rows: Sequence[SpeculatingRow], proposers: Sequence[Proposer]) -> dict[str, _Proposal]:
        """Return by row the offer of which the most tokens are expected, and hold it for `drafts`."""
        taking = [row for row in rows if _takes_offers(row)]
        best = dict[str, tuple[float, _Proposal]]()
        for proposer in proposers:
            for row, offer in zip(taking, self.spending.offers(proposer, taking), strict=True):
                expected = expected_tokens(offer, 1 + self.max_draft) if offer else 0.0
                if offer and (row.id not in best or expected > best[row.id][0]):
                    best[row.id] = expected, _Proposal(proposer, offer, len(row.answer))
        for row in rows:
            self._offered.pop(row.id, None)
        offered = {id: proposal for id, (_, proposal) in best.items()}
        self._offered |= offered
        return offered

    def prepare(
        self, batch: Any, inputs: Sequence[RowInput], fed: FedTokens | None, more_s: float = inf
    ) -> Drafting | None:
        """Let a network draft for all rows of a batch after their next inputs, if that is expected to pay, and return
        what it did. Blocks. `fed`: the last forward of the batch. `more_s`: see `ask_for_drafts`."""
        if not self._networks.allowed:
            return None
        return self._networks.prepare(batch, inputs, [self._ahead_of(each) for each in inputs], fed, more_s)

    def _ahead_of(self, row_input: RowInput) -> Ahead:
        """Return a row whose next input is known."""
        most = 0 if self.ends(row_input) else self._most(row_input.row)
        held = self._held(row_input.row, undelivered(row_input)) if most else None
        return Ahead(view(row_input), most, held.offer if held else None)

    def observe_drafting(self, drafting: Drafting, seconds: float) -> None:
        """Record the seconds of a draft of a network."""
        if drafting.timed and (plain_s := self.plain_s(drafting.rows)):
            self._networks.observe(drafting, seconds / plain_s)

    def add_prompt(self, id: str, entries: PromptEntries | None) -> None:
        """Take over an MTP head's entries of a prompt."""
        self._networks.add_prompt(id, entries)

    def drafts(self, inputs: Sequence[RowInput], more_s: float = inf) -> list[tuple[int, ...] | None]:
        """Return the draft of each row that its next forward verifies: None if the row's input ends its answer.
        If none has a token, a plain step is better. Takes the offers that `ask_for_drafts` was given. `more_s`: as
        there."""
        proposals = [None if self.ends(each) else self._after(each) for each in inputs]
        offers = [proposal.offer if proposal else None for proposal in proposals]
        width = self._width(offers, self._costs, more_s)
        self._proposals |= {each.row.id: made for each, made in zip(inputs, proposals, strict=True) if made}
        drafts = [offer.tokens[: width - 1] if offer else () for offer in offers]
        return [None if self.ends(each) else draft for each, draft in zip(inputs, drafts, strict=True)]

    def _width(self, offers: Sequence[Offer | None], costs: Costs, more_s: float) -> int:
        """Return the tokens per row of the rows' next forward. Memory is reserved for a forward of `CHUNK` tokens."""
        plain_s = self.plain_s(len(offers))
        widest = max(1, min(1 + self.max_draft, CHUNK // len(offers)))
        return choose_width(offers, costs, widest, None if plain_s is None else plain_s + more_s)

    def ends(self, row_input: RowInput) -> bool:
        """Return True if an input that is not delivered yet is the last of its row's answer."""
        row = row_input.row
        if row.last_unfed:
            return False
        ends = row_input.token in self.eos_ids or not row_input.finite
        return ends or len(row.answer) + 1 >= row.request.max_tokens

    def _after(self, row_input: RowInput) -> _Proposal | None:
        """Return the best draft after the row's next input, as far as it may be verified."""
        row, new = row_input.row, undelivered(row_input)
        most = self._most(row)
        if not most:
            return None
        proposals = [self._held(row, new), *self._of_networks(row_input)]
        known = [each for each in proposals if each and each.offer.tokens]
        if not known:
            return None
        best = max(known, key=lambda each: expected_tokens(each.offer, 1 + self.max_draft))
        tokens = self._before_end(best.offer.tokens[:most])
        count = allowed(row.request.grammar, new, tokens)
        return replace(best, offer=best.offer.part(0, count)) if count else None

    def _held(self, row: SpeculatingRow, new: Sequence[int]) -> _Proposal | None:
        """Return the last offer without the row's next input, if it was made in this step and begins with that."""
        held = self._offered.get(row.id)
        if held is None or held.answered != len(row.answer):
            return None
        if not new:
            return held
        right = held.offer.tokens[:1] == tuple(new)
        return replace(held, offer=held.offer.part(1, len(held.offer.tokens))) if right else None

    def _of_networks(self, row_input: RowInput) -> list[_Proposal]:
        """Return the drafts that networks have prepared after the row's next input."""
        if not self._networks:
            return []
        row = view(row_input)
        return [_Proposal(network, offer, len(row.answer)) for network, offer in self._networks.offers(row)]

    def _before_end(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        end = next((index for index, token in enumerate(tokens) if token in self.eos_ids), len(tokens))
        return tokens[:end]

    def _most(self, row: SpeculatingRow) -> int:
        """Return the most tokens of a draft after this row's next input."""
        if row.recomputed:  # drafts may be the cause of the failure that made it recompute
            return 0
        own, left = row.request.max_draft, row.request.max_tokens - len(row.answer) - (not row.last_unfed) - 1
        return max(0, min(left, self.max_draft if own is None else min(own, self.max_draft)))

    def observe_verified(
        self, inputs: Sequence[RowInput], drafts: Sequence[Sequence[int] | None], accepted: Sequence[int]
    ) -> list[Speculated]:
        """Record how many tokens of each draft were accepted."""
        verified = list[Speculated]()
        for row_input, draft, count in zip(inputs, drafts, accepted, strict=True):
            proposal = self._proposals.pop(row_input.row.id, None)
            if draft and proposal:
                proposal.proposer.observe_accepted(row_input.row, len(draft), count)
                self.spending.add_verified(proposal.proposer, len(draft), count)
                kinds = proposal.offer.kinds[: len(draft)]
                verified.append(Speculated(row_input.row.id, proposal.offer.kind, len(draft), count, kinds))
        return verified

    def observe_forward(self, rows: int, width: int, seconds: float) -> None:
        """Record the seconds of a step of one group."""
        if self.max_draft:
            self._costs.observe(rows, width, seconds)

    def nbytes_of(self, batch: Any) -> int:
        """Return the bytes that networks hold for the rows of a batch."""
        return self._networks.nbytes_of(batch)

    def leave(self, row: DraftedRow) -> None:
        """Free the slots of a row that leaves its batch."""
        self._networks.leave(row.id)

    def forget(self, row: DraftedRow) -> None:
        """Free what proposers hold for a row."""
        self._offered.pop(row.id, None)
        self._proposals.pop(row.id, None)
        self._networks.forget(row)
        for proposer in self._proposers:
            proposer.forget(row)


def _takes_offers(row: SpeculatingRow) -> bool:
    """Return True if proposers are asked for drafts of a row."""
    request = row.request
    takes = request.max_draft != 0 and not row.recomputed
    return takes and (request.grammar is None or request.grammar.takes_drafts)


def _after_input(offer: Offer) -> Offer | None:
    """Return an offer that begins with the row's next input, without it."""
    if len(offer.tokens) < 2:
        return None
    first, second, *rates = offer.acceptance
    return Offer(offer.kind, offer.tokens[1:], (first * second, *rates))
