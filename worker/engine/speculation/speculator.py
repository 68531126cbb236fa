"""The one door to speculative decoding: which groups of rows verify drafts in a step, which drafts, and what it costs.

Two rules decide. Drafts are verified in a forward of the width that is expected to make the most tokens per second
(`width`). What they lose all the same, as measured, is limited (`budget`)."""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol, TypeVar

from worker.engine.cache.recurrent import Recurrence
from worker.engine.memory import CHUNK, MemoryModel
from worker.engine.speculation.mtp import HeadProposer, PromptEntries
from worker.engine.speculation.offer import (
    DraftedRow,
    NetworkProposer,
    Offer,
    Proposer,
    RowInput,
    SpeculatingRow,
    undelivered,
    view,
)
from worker.engine.speculation.tuning import STALLED
from worker.engine.speculation.verify import allowed
from worker.engine.speculation.width import DraftBudget, ForwardCosts, choose_width, expected_tokens, likeliest
from worker.engine.step.planner import GapLimit
from worker.outcomes import Speculated


class _Group(Protocol):
    """Rows that decode together."""

    @property
    def rows(self) -> Sequence[SpeculatingRow]:
        """The rows."""

    @property
    def fed(self) -> Any:
        """What the last forward fed, if the network records its hidden states."""

    def launch(self) -> None:
        """Launch a plain step."""

    def collect_drawn(self) -> list[Any]:
        """Return the tokens that were drawn and not delivered."""

    def verify(self, inputs: Any, drafts: Any, recurrence: Recurrence) -> Any:
        """Verify the draft of each row; None if a plain step is needed."""


_AnyGroup = TypeVar("_AnyGroup", bound=_Group)


@dataclass(frozen=True, slots=True)
class _Proposal:
    """An offer, and how many tokens the row's answer had when it was made."""

    proposer: Proposer
    offer: Offer
    answered: int


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A row and what is known of its next draft. `most`: tokens that this may have."""

    row: DraftedRow
    most: int
    known: Offer | None

    def with_draft(self, network: NetworkProposer, *, hopeful: bool) -> Offer | None:
        """Return what is offered if the network drafts for the row."""
        if not self.most:
            return None
        drafted = network.foresee(self.row, hopeful=hopeful)
        return likeliest([self.known, drafted.part(0, self.most) if drafted else None])


@dataclass(frozen=True, slots=True)
class _Plan:
    """Drafts for the next forward of some rows."""

    network: NetworkProposer | None  # that drafts for all of them
    width: int  # tokens per row
    rate: float  # expected tokens per second


@dataclass(frozen=True, slots=True)
class _Drafting:
    """The work of a network in a step."""

    network: NetworkProposer
    depth: int  # tokens of the drafts
    seconds: float
    alone: bool  # it did nothing else


class Speculator:
    """The drafts of all rows. For the engine's thread.

    In each step, `choose_groups` returns the groups that should verify drafts, of which each is then given to `verify`;
    what the others take is recorded with `observe_plain`."""

    def __init__(
        self,
        proposers: Sequence[Proposer] = (),
        *,
        head: HeadProposer | None = None,
        draft: NetworkProposer | None = None,
        max_draft: int = 0,
        recurrence: Recurrence | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        """`head`, `draft`: proposers more, for all rows of a group at once. `max_draft`: most tokens of a draft; 0: no
        drafts. `recurrence`: see `Recurrence`. `eos_ids`: tokens that end an answer; none is fed as a part of a draft,
        so no state runs past one."""
        networks = [network for network in (head, draft) if network]
        self.max_draft = max_draft if proposers or networks else 0
        self._proposers: Sequence[Proposer] = proposers if max_draft else ()
        self._networks: Sequence[NetworkProposer] = networks if max_draft else ()
        self._head = head if max_draft else None
        self.recurrence = recurrence or Recurrence()
        self._eos_ids = frozenset(eos_ids)
        self.costs, self._budget = ForwardCosts(), DraftBudget()
        self._offered: dict[str, _Proposal] = {}  # by row: the last offer
        self._begun = True  # rows have joined, and proposers have work for them
        self._trying: NetworkProposer | None = None  # drafts in this step although that is not expected to pay
        self._more_s = inf  # most seconds that drafts may add to the forward of each group in this step
        self._running_s = 0.0  # expected seconds of the plain steps that groups have launched in this step
        self._verified: Collection[Proposer] = ()  # whose drafts the last step has verified
        self.drafts: list[Speculated] = []  # verified in the last step
        self.tokens = 0  # rows x width of the largest forward that verified them

    @property
    def uses_head(self) -> bool:
        """True if drafts of an MTP head are offered, which needs the hidden states of all forwards."""
        return self._head is not None

    def reserving(self, costs: MemoryModel) -> MemoryModel:
        """Return the memory model with what drafts need."""
        states = self.recurrence.held_states(1 + self.max_draft)
        return replace(costs, max_draft=self.max_draft, draft_states=states)

    # The choice of groups

    def choose_groups(self, groups: Sequence[_AnyGroup], gap: GapLimit | None = None) -> list[_AnyGroup]:
        """Return the groups that are expected to gain from drafts in their next step. Called once in each step. `gap`:
        limit of the step."""
        self._running_s = 0.0
        if not self.max_draft:
            return []
        if self._begun:
            rows = [row for group in groups for row in group.rows if _takes_drafts(row)]
            self._begun = sum(proposer.begin_step(rows) for proposer in self._proposers) > 0
        chosen = list[_AnyGroup]()
        if self._budget.may_ask and not self.costs.is_plain_due(len(group.rows) for group in groups):
            self._more_s = self._share_s(groups, gap) if gap else inf
            chosen = [group for group in groups if self._more_s > 0 and self._worthwhile(group)]
        for group in groups:
            if group not in chosen:
                self._launch(group)
        return chosen

    def _share_s(self, groups: Sequence[_Group], gap: GapLimit) -> float:
        """Return the most seconds that drafts may add to the forward of each group."""
        plain_s = sum(self.costs.seconds(len(group.rows), 1) for group in groups) if self.costs.measured else 0.0
        running = any(not row.last_unfed for group in groups for row in group.rows)
        return (gap.verify_s(plain_s, running=running) - plain_s) / max(1, len(groups))

    def _launch(self, group: _Group) -> None:
        """Record that a group launches a plain step."""
        if self.costs.measured:
            step_s = self.costs.mean_plain_s(len(group.rows))
            self._running_s += step_s
            self._budget.pass_time(step_s)

    def _worthwhile(self, group: _Group) -> bool:
        """Ask for drafts of a group, and return True if it is expected to gain from them."""
        began = time.perf_counter()
        if self.ask_for_drafts(group.rows, self._more_s):
            return True
        self._budget.charge_asks(time.perf_counter() - began)
        return False

    def ask_for_drafts(self, rows: Sequence[SpeculatingRow], more_s: float = inf) -> bool:
        """Ask each proposer for a draft of each row, and hold the best for `verify`. Return True if a forward of these
        rows is expected to gain from them, or if a network is tried that is not expected to pay. If the rows' next
        inputs are not known yet, the drafts must begin with them. `more_s`: most seconds that drafting and the forward
        may take more than a plain one."""
        self._offer(rows)
        ahead = [_Ahead(row, self._most(row), self._foreseen(row)) for row in rows]
        plan = self._plan(ahead, more_s)
        self._trying = None if plan else self._trial(ahead, more_s)
        return bool(plan or self._trying)

    def _offer(self, rows: Sequence[SpeculatingRow]) -> None:
        """Hold for each row the offer of which the most tokens are expected."""
        best = dict[str, float]()
        taking = [row for row in rows if _takes_offers(row)]
        for row in rows:
            self._offered.pop(row.id, None)
        for proposer in filter(self._budget.allows, self._proposers):
            for row in taking:
                if (offer := proposer.offer(row)) is None:
                    continue
                expected = expected_tokens(offer, 1 + self.max_draft)
                if expected > best.get(row.id, 0.0):
                    best[row.id], self._offered[row.id] = expected, _Proposal(proposer, offer, len(row.answer))

    def _foreseen(self, row: SpeculatingRow) -> Offer | None:
        """Return what is likely to be offered once the row's next input is known."""
        known = self._offered[row.id].offer if row.id in self._offered and self._most(row) else None
        return _after_input(known) if known and not row.last_unfed else known

    def _plan(self, ahead: Sequence[_Ahead], more_s: float, *, hopeful: bool = False) -> _Plan | None:
        """Return the drafts that are expected to gain the most; None if a plain step is better. `hopeful`: networks
        take no time, and are as often right as is hoped for."""
        plans = [self._planned(None, [each.known for each in ahead], more_s, None)]
        for network in filter(self._budget.allows, self._networks):
            offers = [each.with_draft(network, hopeful=hopeful) for each in ahead]
            plans.append(self._planned(network, offers, more_s, None if hopeful else network.kind))
        return max(filter(None, plans), key=lambda plan: plan.rate, default=None)

    def _planned(
        self, network: NetworkProposer | None, offers: Sequence[Offer | None], more_s: float, timed: str | None
    ) -> _Plan | None:
        """`timed`: the network whose time counts."""
        if not any(offers) or (width := self._width(offers, more_s, timed)) <= 1:
            return None
        seconds = self.costs.seconds(len(offers), width, timed) if self.costs.measured else 1.0
        return _Plan(network, width, sum(expected_tokens(offer, width) for offer in offers) / seconds)

    def _width(self, offers: Sequence[Offer | None], more_s: float, network: str | None = None) -> int:
        """Return the tokens per row of the rows' next forward. Memory is reserved for a forward of `CHUNK` tokens."""
        widest = max(1, min(1 + self.max_draft, CHUNK // len(offers)))
        most_s = self.costs.seconds(len(offers), 1) + more_s if self.costs.measured else None
        return choose_width(offers, self.costs, widest, most_s, network)

    def _trial(self, ahead: Sequence[_Ahead], more_s: float) -> NetworkProposer | None:
        """Return a network that is tried in this step, if any: texts change, and so does what drafts cost. It must have
        made up for what the last trial lost."""
        if not any(map(self._budget.is_full, self._networks)):
            return None
        hoped = self._plan(ahead, more_s, hopeful=True)
        return hoped.network if hoped and self._budget.is_full(hoped.network) else None

    # The verification of a group's drafts

    def begin_step(self, idle_s: float) -> None:
        """Forget the last step. `idle_s`: seconds for which the device was idle before plain steps are launched, since
        the last step has verified drafts. The launch itself is not counted: on a CPU it takes as long as the step."""
        if idle_s:
            for proposer in self._verified:
                self._budget.charge(proposer, idle_s / len(self._verified))
        self.drafts = []
        self.tokens = 0

    def verify(self, group: _Group, inputs: Sequence[RowInput], host_s: float | None = None) -> list[Any] | None:
        """Verify the drafts of a group, and return the tokens to deliver. None, and the rows are as before, if no draft
        is worthwhile after these inputs, or if a plain step is needed: see `DecodeBatch.verify`. Blocks. `host_s`:
        seconds of the host's work that belong to this step and came before; None: the device does other work meanwhile,
        so costs are not learned."""
        if all(self._ends(each) for each in inputs):
            return group.collect_drawn()  # a forward would feed tokens after which nothing follows
        began = time.perf_counter()
        drafting = self.prepare(group, inputs, self._more_s)
        proposals = self.proposals(inputs, self._more_s - (drafting.seconds if drafting else 0.0))
        drafts = [made.offer.tokens if made else None for made in proposals]
        step = group.verify(inputs, drafts, self.recurrence) if any(drafts) else None
        if step is None:
            self._charge_in_vain(drafting, self._taken_s(began, host_s))
            return None
        rows, width = len(inputs), 1 + max(len(draft) for draft in drafts if draft)
        seconds = self._taken_s(began, host_s)
        self._charge_verified(rows, width, seconds, drafting, proposals, step.accepted)
        if host_s is not None:
            self.costs.observe(rows, width, seconds - (drafting.seconds if drafting else 0.0))
        self.tokens = max(self.tokens, rows * width)
        for row_input, made, accepted in zip(inputs, proposals, step.accepted, strict=True):
            if made and made.offer.tokens:
                made.proposer.observe_accepted(row_input.row, len(made.offer.tokens), accepted)
                offer = made.offer
                self.drafts.append(Speculated(row_input.row.id, offer.kind, len(offer.tokens), accepted, offer.kinds))
        verified: list[Any] = step.tokens
        return verified

    def prepare(self, group: _Group, inputs: Sequence[RowInput], more_s: float = inf) -> _Drafting | None:
        """Let a network draft for all rows of a group after their next inputs, if that is expected to pay, and return
        what it did. Blocks. `more_s`: see `ask_for_drafts`."""
        trying, self._trying = self._trying, None
        if not any(map(self._budget.allows, self._networks)):
            return None
        ahead = [self._ahead_of(each) for each in inputs]
        if not any(each.most for each in ahead):
            return None
        plan = self._plan(ahead, more_s)
        network = plan.network if plan else trying
        if network is None:
            return None
        # Drafts of full depth tell soonest how deep they should be.
        rows = len(inputs)
        depth = min(plan.width - 1, network.depth) if plan else self._affordable_depth(network, rows, more_s)
        if depth == 0:
            return None
        began = time.perf_counter()
        prefill_s = more_s - self.costs.draft_s(network.kind, rows, depth)
        alone = network.prepare(group, inputs, group.fed, depth, prefill_s)
        seconds = time.perf_counter() - began
        if alone:
            self.costs.observe_draft(network.kind, rows, depth, seconds)
        return _Drafting(network, depth, seconds, alone)

    def _ahead_of(self, row_input: RowInput) -> _Ahead:
        """Return a row whose next input is known."""
        most = 0 if self._ends(row_input) else self._most(row_input.row)
        held = self._held(row_input.row, undelivered(row_input)) if most else None
        return _Ahead(view(row_input), most, held.offer if held else None)

    def _affordable_depth(self, network: NetworkProposer, rows: int, more_s: float) -> int:
        """Return the most tokens that the network drafts within `more_s` seconds; 0 if it drafts none."""
        depths = range(network.depth, 0, -1)
        return next((depth for depth in depths if self.costs.draft_s(network.kind, rows, depth) <= more_s), 0)

    def proposals(self, inputs: Sequence[RowInput], more_s: float = inf) -> list[_Proposal | None]:
        """Return the draft of each row that its next forward verifies, of no token if there is none: None if the row's
        input ends its answer. If none has a token, a plain step is better. `more_s`: see `ask_for_drafts`."""
        best = [None if self._ends(each) else self._after(each) for each in inputs]
        width = self._width([made.offer if made else None for made in best], more_s)
        return [replace(made, offer=made.offer.part(0, width - 1)) if made else None for made in best]

    def _after(self, row_input: RowInput) -> _Proposal:
        """Return the best draft after the row's next input, as far as it may be verified."""
        row, new = row_input.row, undelivered(row_input)
        most = self._most(row)
        known = [] if not most else [self._held(row, new), *self._of_networks(row_input)]
        proposals = [each for each in known if each and each.offer.tokens]
        if not proposals:
            return _NOTHING
        best = max(proposals, key=lambda each: expected_tokens(each.offer, 1 + self.max_draft))
        tokens = best.offer.tokens[:most]
        end = next((index for index, token in enumerate(tokens) if token in self._eos_ids), len(tokens))
        count = allowed(row.request.grammar, new, tokens[:end])
        return replace(best, offer=best.offer.part(0, count))

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
        offers = [(network, network.offer(row)) for network in self._networks]
        return [_Proposal(network, offer, len(row.answer)) for network, offer in offers if offer]

    def _ends(self, row_input: RowInput) -> bool:
        """Return True if an input that is not delivered yet is the last of its row's answer."""
        row = row_input.row
        if row.last_unfed:
            return False
        ends = row_input.token in self._eos_ids or not row_input.finite
        return ends or len(row.answer) + 1 >= row.request.max_tokens

    def _most(self, row: SpeculatingRow) -> int:
        """Return the most tokens of a draft after this row's next input."""
        if row.recomputed:  # drafts may be the cause of the failure that made it recompute
            return 0
        own, left = row.request.max_draft, row.request.max_tokens - len(row.answer) - (not row.last_unfed) - 1
        return max(0, min(left, self.max_draft if own is None else min(own, self.max_draft)))

    # What it costs

    def _taken_s(self, began: float, host_s: float | None) -> float:
        """Return the seconds of a group's part of the step. What other groups run meanwhile is not a part of it."""
        seconds = time.perf_counter() - began
        if host_s is not None:
            return host_s + seconds
        waited_s = min(seconds, self._running_s)
        self._running_s -= waited_s
        return seconds - waited_s

    def _charge_in_vain(self, drafting: _Drafting | None, seconds: float) -> None:
        """Charge that a group was asked for drafts of which none is verified: it launches a plain step only now."""
        if drafting:
            self._budget.charge(drafting.network, seconds)
        else:
            self._budget.charge_asks(seconds)

    def _charge_verified(
        self,
        rows: int,
        width: int,
        seconds: float,
        drafting: _Drafting | None,
        proposals: Sequence[_Proposal | None],
        accepted: Sequence[int],
    ) -> None:
        """Charge a forward that has verified drafts. A machine stalls any step, with drafts or without, so that more
        than a multiple of its usual seconds says nothing about them."""
        made = [
            (each.proposer, len(each.offer.tokens), count)
            for each, count in zip(proposals, accepted, strict=True)
            if each
        ]
        drafts = [each for each in made if each[1]]
        self._verified = {proposer for proposer, *_ in drafts}
        if not self.costs.measured:
            return
        if drafting is None or drafting.alone:
            usual_s = self.costs.seconds(rows, width)
            usual_s += self.costs.draft_s(drafting.network.kind, rows, drafting.depth) if drafting else 0.0
            seconds = min(seconds, STALLED * usual_s)
        network = (drafting.network, min(drafting.seconds, seconds)) if drafting else None
        self._budget.charge_verified(rows, seconds, self.costs.mean_plain_s(rows), drafts, network)

    def launch_plain(self, group: _Group) -> None:
        """Launch a plain step of a group for which `verify` has just returned None."""
        self._launch(group)
        group.launch()

    def observe_plain(self, rows: int, seconds: float) -> None:
        """Record the seconds that a plain step of a group takes."""
        if self.max_draft:
            self.costs.observe(rows, 1, seconds)

    # Rows that come and go

    def join(self, rows: Iterable[tuple[str, PromptEntries | None]]) -> None:
        """Take over an MTP head's entries of prompts, whose rows, by their ids, have joined a group."""
        self._begun = True
        for id, entries in rows:
            if self._head:
                self._head.add_prompt(id, entries)

    def nbytes_of(self, group: _Group) -> int:
        """Return the bytes that networks which draft hold for the rows of a group."""
        return sum(network.nbytes_of(group) for network in self._networks)

    def leave(self, row: DraftedRow) -> None:
        """Free what is held for the row's place in its group."""
        for network in self._networks:
            network.leave(row.id)

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for the drafts of a row."""
        self._offered.pop(row.id, None)
        for proposer in (*self._proposers, *self._networks):
            proposer.forget(row)


_NOTHING = _Proposal(Proposer(), Offer("", (), ()), 0)


def _takes_drafts(row: SpeculatingRow) -> bool:
    return row.request.max_draft != 0 and not row.recomputed


def _takes_offers(row: SpeculatingRow) -> bool:
    """Return True if proposers are asked for drafts of a row."""
    return _takes_drafts(row) and (row.request.grammar is None or row.request.grammar.takes_drafts)


def _after_input(offer: Offer) -> Offer | None:
    """Return an offer that begins with the row's next input, without it."""
    if len(offer.tokens) < 2:
        return None
    first, second, *rates = offer.acceptance
    return Offer(offer.kind, offer.tokens[1:], (first * second, *rates))
