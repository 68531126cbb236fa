"""The networks that draft for all rows of a group at once, and when that pays."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any

from worker.engine.speculation.draft_model import DraftModelProposer
from worker.engine.speculation.inputs import RowInput, undelivered, view
from worker.engine.speculation.mtp.prompt import PromptEntries
from worker.engine.speculation.mtp.proposer import FedTokens, HeadInput, HeadProposer
from worker.engine.speculation.offer import DraftedRow, Offer
from worker.engine.speculation.spending import Spending
from worker.engine.speculation.width import Costs, DraftedCosts, DraftingCosts, expected_tokens, likeliest

Network = HeadProposer | DraftModelProposer

_TRIAL_EVERY = 16  # times that networks are asked and do not pay


@dataclass(frozen=True, slots=True)
class Ahead:
    """A row and what is known of its next draft. `most`: tokens that this may have."""

    row: DraftedRow
    most: int
    known: Offer | None

    def with_draft(self, network: Network, *, hopeful: bool) -> Offer | None:
        """Return what is offered if the network drafts for the row."""
        if not self.most:
            return None
        drafted = network.foresee_optimistically(self.row) if hopeful else network.foresee(self.row)
        return likeliest([self.known, drafted.part(0, self.most) if drafted else None])


@dataclass(frozen=True, slots=True)
class Drafting:
    """The work of a network in a step."""

    network: Network
    rows: int
    depth: int  # tokens of the drafts
    timed: bool  # its time is that of drafts of as many tokens for all rows


@dataclass(frozen=True, slots=True)
class _Plan:
    """Drafts for the next forward of some rows."""

    network: Network | None  # that drafts for all of them
    width: int  # tokens per row
    rate: float  # expected tokens per second


class Networks:
    """The networks of an engine, which draft where the tokens that they bring are worth their time and that of a wider
    forward. For the engine's thread."""

    def __init__(
        self,
        networks: Sequence[Network],
        costs: Costs,
        width_of: Callable[[Sequence[Offer | None], Costs, float], int],
        spending: Spending,
    ) -> None:
        """`costs`: of forwards. `width_of(offers, costs, more_s)`: tokens per row of the forward that is best for these
        offers, and takes at most `more_s` seconds more than a plain one. `spending`: pauses networks."""
        self._networks = networks
        self._spending = spending
        self._costs, self._width_of = costs, width_of
        self._drafting = {network.kind: DraftingCosts() for network in networks}
        self._asks = 0  # that did not pay
        self._trying: Network | None = None  # drafts in this step although that is not expected to pay

    def __bool__(self) -> bool:
        return bool(self._networks)

    @property
    def allowed(self) -> list[Network]:
        """Those that are not paused."""
        return self._spending.allowed(self._networks)

    @property
    def have_head(self) -> bool:
        """True if one of them is an MTP head."""
        return any(isinstance(network, HeadProposer) for network in self._networks)

    def ask_for_drafts(self, ahead: Sequence[Ahead], more_s: float) -> bool:
        """Decide if a network drafts in this step, and return True if one does, or if a forward of these rows is
        expected to gain from other drafts. Now and then it tries a network that is not expected to pay: texts change,
        and so does what drafts cost."""
        began = perf_counter()
        worthwhile = self._plan(ahead, more_s) is not None
        self._trying = None if worthwhile else self._trial(ahead, more_s)
        seconds = perf_counter() - began
        for network in (asked := self.allowed):
            self._spending.ask(network, seconds / len(asked))
        return worthwhile or self._trying is not None

    def _trial(self, ahead: Sequence[Ahead], more_s: float) -> Network | None:
        """Return the network that is tried in this step, if any. Until it is known how often its drafts are right, one
        is tried whenever it is asked: a head may be right more often than is expected of any."""
        self._asks += 1
        due = self._asks % _TRIAL_EVERY == 0
        if not due and all(network.is_known for network in self.allowed):
            return None
        hoped = self._plan(ahead, more_s, hopeful=True)
        network = hoped.network if hoped else None
        return network if network and (due or not network.is_known) else None

    def _plan(self, ahead: Sequence[Ahead], more_s: float, *, hopeful: bool = False) -> _Plan | None:
        """Return the drafts that are expected to gain the most; None if a plain step is better. `hopeful`: networks
        take no time, and are as often right as they were expected to be at first."""
        plans = [self._planned(None, [each.known for each in ahead], self._costs, more_s)]
        for network in self.allowed:
            costs = self._costs if hopeful else DraftedCosts(self._costs, self._drafting[network.kind])
            offers = [each.with_draft(network, hopeful=hopeful) for each in ahead]
            plans.append(self._planned(network, offers, costs, more_s))
        return max(filter(None, plans), key=lambda plan: plan.rate, default=None)

    def _planned(
        self, network: Network | None, offers: Sequence[Offer | None], costs: Costs, more_s: float
    ) -> _Plan | None:
        if not any(offers) or (width := self._width_of(offers, costs, more_s)) <= 1:
            return None
        seconds = costs.seconds(len(offers), width) if costs.measured else 1.0
        return _Plan(network, width, sum(expected_tokens(offer, width) for offer in offers) / seconds)

    def prepare(
        self, batch: Any, inputs: Sequence[RowInput], ahead: Sequence[Ahead], fed: FedTokens | None, more_s: float
    ) -> Drafting | None:
        """Let a network draft for all rows of a batch after their next inputs, if that is expected to pay, and return
        what it did. Blocks. `ahead`: the same rows, with these inputs. `fed`: the last forward of the batch."""
        trying, self._trying = self._trying, None
        if not any(each.most for each in ahead):
            return None
        plan = self._plan(ahead, more_s)
        network = plan.network if plan else trying
        if network is None:
            return None
        # Drafts of full depth tell soonest how deep they should be.
        if plan and network.is_known:
            depth = min(plan.width - 1, network.depth)
        else:
            depth = self._affordable_depth(network, len(inputs), more_s)
        if depth == 0:
            return None
        if isinstance(network, HeadProposer):
            drafted = network.prepare(batch, [_head_input(each) for each in inputs], fed, depth)
        else:
            prefill_s = more_s - self._drafting_s(network, len(inputs), depth)
            drafted = network.prepare(batch, [view(each) for each in inputs], depth, prefill_s)
        return Drafting(network, len(inputs), depth, drafted)

    def _affordable_depth(self, network: Network, rows: int, more_s: float) -> int:
        """Return the most tokens that the network drafts within `more_s` seconds; 0 if it drafts none."""
        depths = range(network.depth, 0, -1)
        return next((depth for depth in depths if self._drafting_s(network, rows, depth) <= more_s), 0)

    def _drafting_s(self, network: Network, rows: int, depth: int) -> float:
        """Return the expected seconds of a draft; 0 before any forward was measured."""
        if not self._costs.measured:
            return 0.0
        return self._drafting[network.kind].plain_steps(rows, depth) * self._costs.seconds(rows, 1)

    def usual_s(self, drafting: Drafting) -> float:
        """Return the expected seconds of such a draft; infinite if the network did other work too."""
        return self._drafting_s(drafting.network, drafting.rows, drafting.depth) if drafting.timed else inf

    def observe(self, drafting: Drafting, plain_steps: float) -> None:
        """Record how long a draft has taken, in plain steps of as many rows."""
        self._drafting[drafting.network.kind].observe(drafting.rows, drafting.depth, plain_steps)

    def offers(self, row: DraftedRow) -> Iterator[tuple[Network, Offer]]:
        """Yield the drafts that networks have prepared after the row's last token."""
        for network in self._networks:
            if offer := network.offer(row):
                yield network, offer

    def add_prompt(self, id: str, entries: PromptEntries | None) -> None:
        """Take over an MTP head's entries of a prompt."""
        for network in self._networks:
            if isinstance(network, HeadProposer):
                network.add_prompt(id, entries)

    def nbytes_of(self, batch: Any) -> int:
        """Return the bytes that are held for the rows of a batch."""
        return sum(network.nbytes_of(batch) for network in self._networks)

    def leave(self, id: str) -> None:
        """Free the slots of a row that leaves its batch."""
        for network in self._networks:
            network.leave(id)

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row."""
        for network in self._networks:
            network.forget(row)


def _head_input(each: RowInput) -> HeadInput:
    row = each.row
    return HeadInput(row.id, len(row.answer) + len(undelivered(each)), each.token, row.end)
