"""How rows whose prompts are computed join the decoding rows."""

import time
from collections.abc import Sequence

from worker.engine.admission_controller import AdmissionController
from worker.engine.batch.groups import Groups
from worker.engine.batch.row import Row
from worker.engine.isolation import isolate
from worker.engine.memory import MemoryModel
from worker.engine.prefill.caches import EngineCaches
from worker.engine.prefill.queue import PrefillQueue
from worker.engine.prefill.task import ComputedPrompt


class Joins:
    """Lets rows join the decoding rows, together if memory allows, and measures what that takes. For the engine's
    thread."""

    def __init__(
        self,
        costs: MemoryModel,
        prefills: PrefillQueue,
        running: Groups,
        admission: AdmissionController,
        caches: EngineCaches,
    ) -> None:
        """All stay owned by the caller. `prefills` is told the seconds of joins, `admission` that memory is free."""
        self._costs = costs
        self._prefills, self._running = prefills, running
        self._admission, self._caches = admission, caches

    def join(self, computed: list[ComputedPrompt]) -> list[Row]:
        """Let rows join the running rows: together, or one by one if that fails or memory is short. Returns the rows
        that failed, and empties the list. Blocks."""
        if len(computed) > 1 and self._can_join_together(computed):
            with isolate(f"the join of {len(computed)} rows"):
                self._join(computed)
        decoding = {row for _, row in self._running}
        failed = list[Row]()
        while computed:  # each cache is freed when its row has joined
            joined = computed.pop(0)
            if (row := joined.joining.row) not in decoding:
                with isolate(f"{row.id}: join") as attempt:
                    self._join([joined])
                if attempt.failed:
                    failed.append(row)
        return failed

    def _can_join_together(self, computed: Sequence[ComputedPrompt]) -> bool:
        """Return True if memory is left for the caches of all these rows while they are copied; one is reserved."""
        caches_bytes = (len(computed) - 1) * self._costs.row_bytes(max(each.tokens for each in computed))
        return caches_bytes <= self._admission.free_bytes - self._caches.nbytes

    def _join(self, computed: Sequence[ComputedPrompt]) -> None:
        growth = max(self._running.join_copy_bytes(each.tokens) for each in computed)
        began = time.perf_counter()
        self._running.add([each.joining for each in computed])
        row_s = (time.perf_counter() - began) / len(computed)
        for each in computed:
            self._prefills.observe_join(each.tokens, growth // len(computed), row_s)
            if each.joining.row.request.images:
                self._admission.mark_dirty()  # the features of its images are released
