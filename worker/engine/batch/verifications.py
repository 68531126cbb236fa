"""Steps in which groups of rows verify drafts."""

import time
from collections.abc import Iterable, Sequence

from worker.engine.batch.decode_batch import ComputedRow, DecodeBatch, StepToken
from worker.engine.batch.row import Row
from worker.engine.speculation.speculator import Speculator
from worker.schedule.outcomes import Speculated


class Verifications:
    """The drafts that groups verify in one step, with their results and times."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self.drafts: list[Speculated] = []  # verified in the last step
        self.step_s = 0.0  # seconds that the verifications of the last step took
        self.tokens = 0  # rows x width of the largest of them

    @property
    def max_draft(self) -> int:
        """Most tokens of a draft."""
        return self._speculator.max_draft

    def worthwhile(self, groups: Sequence[DecodeBatch]) -> list[DecodeBatch]:
        """Return the groups that are expected to gain from drafts in their next step."""
        return [group for group in groups if self._speculator.is_worthwhile(group.rows)]

    def begin_step(self) -> None:
        """Forget the last step."""
        self.drafts = []
        self.step_s, self.tokens = 0.0, 0

    def verify(self, group: DecodeBatch, inputs: Sequence[StepToken], *, alone: bool) -> list[StepToken] | None:
        """Verify the drafts of a group, and return the tokens to deliver. None, and nothing is done, if no draft is
        worthwhile after these inputs. Blocks. `alone`: the device does nothing else meanwhile, so the time counts."""
        began = time.perf_counter()
        self._speculator.prepare(group, inputs, group.fed)
        drafts = self._speculator.drafts(inputs)
        if not any(drafts):
            return None
        step = group.verify(inputs, drafts, self._speculator.recurrence)
        self.drafts += self._speculator.observe_verified(inputs, drafts, step.right)
        seconds = time.perf_counter() - began
        self.step_s += seconds
        width = 1 + max(len(draft) for draft in drafts if draft)
        self.tokens = max(self.tokens, len(inputs) * width)
        if alone:
            self._speculator.observe_forward(len(inputs), width, seconds)
        return step.tokens

    def observe_plain(self, rows: int, seconds: float) -> None:
        """Record the seconds of a plain step of a single group."""
        self._speculator.observe_forward(rows, 1, seconds)

    def add_prompts(self, rows: Iterable[ComputedRow]) -> None:
        """Take over an MTP head's entries of prompts, whose rows join a group."""
        for each in rows:
            self._speculator.add_prompt(each.row.id, each.entries)

    def forget(self, row: Row) -> None:
        """Free what is held for the drafts of a row."""
        self._speculator.forget(row)
