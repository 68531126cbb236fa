"""Steps in which groups of rows verify drafts."""

import time
from collections.abc import Iterable, Sequence
from math import inf
from weakref import WeakKeyDictionary

from worker.engine.batch.decode_batch import ComputedRow, DecodeBatch
from worker.engine.batch.pending import StepToken
from worker.engine.batch.row import Row
from worker.engine.speculation.losses import Backoff, Baseline
from worker.engine.speculation.speculator import Speculator
from worker.engine.step.budget import GapLimit
from worker.outcomes import Speculated


class Verifications:
    """The drafts that groups verify in one step, with their results and times."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator, self._spending = speculator, speculator.spending
        self._backoffs = WeakKeyDictionary[DecodeBatch, Backoff]()
        self._last_backoff: Backoff | None = None  # of the group that was asked last
        self._baseline = Baseline()
        self._more_s = inf  # most seconds that drafts may add to the forward of each group in this step
        self.drafts: list[Speculated] = []  # verified in the last step
        self.tokens = 0  # rows x width of the largest of them

    @property
    def max_draft(self) -> int:
        """Most tokens of a draft."""
        return self._speculator.max_draft

    def choose_groups(self, groups: Sequence[DecodeBatch], gap: GapLimit | None = None) -> list[DecodeBatch]:
        """Return the groups that are expected to gain from drafts in their next step. Called once in each step. `gap`:
        limit of the step."""
        if not self.max_draft:
            return []
        self._speculator.begin_step(row for group in groups for row in group.rows)
        chosen = list[DecodeBatch]()
        if not self._baseline.advance(known=all(self._speculator.knows_plain(len(group.rows)) for group in groups)):
            self._more_s = self._share_s(groups, gap) if gap else inf
            chosen = [group for group in groups if self._ask_for_drafts(group)]
        for group in groups:
            if group not in chosen:
                self._spending.launch_plain(len(group.rows))
        return chosen

    def _share_s(self, groups: Sequence[DecodeBatch], gap: GapLimit) -> float:
        """Return the most seconds that drafts may add to the forward of each group."""
        plain_s = sum(self._speculator.plain_s(len(group.rows)) or 0.0 for group in groups)
        running = any(not row.last_unfed for group in groups for row in group.rows)
        return (gap.verify_s(plain_s, running=running) - plain_s) / max(1, len(groups))

    def _ask_for_drafts(self, group: DecodeBatch) -> bool:
        """Ask for drafts of a group, of all proposers if its pause is over. Return True if they are worthwhile."""
        if self._more_s <= 0:  # no draft fits into the gap
            return False
        backoff = self._backoff_of(group)
        due = backoff.advance()
        worthwhile = self._speculator.ask_for_drafts(group.rows, all_proposers=due, more_s=self._more_s)
        # A draft that the gap has no room for is no evidence against its proposer.
        if due and (worthwhile or self._more_s >= self._speculator.widest_more_s(len(group.rows))):
            backoff.observe(worthwhile)
            self._last_backoff = backoff
        return worthwhile

    def _backoff_of(self, group: DecodeBatch) -> Backoff:
        if group not in self._backoffs:
            self._backoffs[group] = Backoff(self._last_backoff)
        return self._backoffs[group]

    def begin_step(self, idle_s: float) -> None:
        """Forget the last step. `idle_s`: seconds for which the device was idle before plain steps are launched, since
        the last step has verified drafts. The launch itself is not counted: on a CPU it takes as long as the step."""
        self._spending.observe_idle(idle_s)
        self.drafts = []
        self.tokens = 0

    def verify(
        self, group: DecodeBatch, inputs: Sequence[StepToken], host_s: float | None = None
    ) -> list[StepToken] | None:
        """Verify the drafts of a group, and return the tokens to deliver. None, and the rows are as before, if no draft
        is worthwhile after these inputs, or if a plain step is needed: see `DecodeBatch.verify`. Blocks. `host_s`:
        seconds of the host's work that belong to this step and came before; None: the device does other work meanwhile,
        so costs are not learned."""
        if all(self._speculator.ends(each) for each in inputs):
            return group.collect_drawn()  # a forward would feed tokens after which nothing follows
        began = time.perf_counter()
        self._spending.begin_group(host_s)
        drafted = self._speculator.prepare(group, inputs, group.fed, self._more_s)
        prepared = time.perf_counter()
        self._spending.draft(drafted.network if drafted else None, prepared - began)
        if drafted and host_s is not None:
            self._speculator.observe_drafting(drafted, prepared - began)
        drafts = self._speculator.drafts(inputs, self._more_s - (prepared - began))
        step = group.verify(inputs, drafts, self._speculator.recurrence) if any(drafts) else None
        if step is None:
            return None
        self.drafts += self._speculator.observe_verified(inputs, drafts, step.accepted)
        ended = time.perf_counter()
        width = 1 + max(len(draft) for draft in drafts if draft)
        self._spending.verify(len(inputs), self._speculator.usual_s(len(inputs), width, drafted))
        self.tokens = max(self.tokens, len(inputs) * width)
        if host_s is not None:
            self._speculator.observe_forward(len(inputs), width, host_s + ended - prepared)
        return step.tokens

    def launch_plain(self, group: DecodeBatch) -> None:
        """Launch a plain step of a group for which `verify` has just returned None."""
        self._spending.delay_plain(len(group.rows))
        group.launch()

    def observe_plain(self, rows: int, seconds: float) -> None:
        """Record the seconds that a plain step of a group takes."""
        self._baseline.observe_plain()
        self._speculator.observe_forward(rows, 1, seconds)

    def without_asks(self, seconds: float) -> float:
        """Return the seconds of a plain step without those in which its groups were asked for drafts, which are charged
        already; at least half of them."""
        return max(seconds - self._spending.asked_s, seconds / 2)

    def join(self, group: DecodeBatch, rows: Iterable[ComputedRow]) -> None:
        """Take over an MTP head's entries of prompts, whose rows have joined a group, and ask them for drafts soon."""
        self._backoff_of(group).join()
        for each in rows:
            self._speculator.add_prompt(each.row.id, each.entries)

    def nbytes_of(self, group: DecodeBatch) -> int:
        """Return the bytes that networks which draft hold for the rows of a group."""
        return self._speculator.nbytes_of(group)

    def leave(self, row: Row) -> None:
        """Free what is held for the row's place in its group."""
        self._speculator.leave(row)

    def forget(self, row: Row) -> None:
        """Free what is held for the drafts of a row."""
        self._speculator.forget(row)
