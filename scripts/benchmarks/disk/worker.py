"""An engine with the prefix cache of a worker, for the measurements of prefixes on disk."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from scripts.benchmarks.engine import prompt
from worker.engine.engine import Engine
from worker.engine.model.load import Model
from worker.engine.prefix.disk import DiskTier
from worker.prefix_store.store import StoreOptions
from worker.schedule.outcomes import Prefilled, Sampled
from worker.schedule.request import GenerationRequest

CACHE_BYTES = 8 << 30  # more than any of these measurements stores in memory
ANSWER = 4  # tokens
WARM_UP = 300  # tokens: the speed of prefill is measured by them
_WARM_UPS = count(1)


class Worker:
    """An engine with the prefix cache of a worker."""

    def __init__(
        self, model: Model, folder: Path | None, *, prefix_bytes: int = CACHE_BYTES, bits: int | None = None
    ) -> None:
        """`folder`: of the prefixes on disk; None: they are kept in memory only. `bits`: see `DiskTier`."""
        self._woken = threading.Event()
        self._requests = 0
        self._tier: DiskTier | None = None

        def open_tier(model: Model) -> DiskTier:
            assert folder is not None
            self._tier = tier_of(model, folder, self._woken.set, bits=bits)
            return self._tier

        self.engine = Engine(model, step_s=1.0, prefix_bytes=prefix_bytes, open_tier=open_tier if folder else None)
        self.answer(prompt(WARM_UP, seed=-next(_WARM_UPS)), boundaries=())  # no file has it, so it measures prefill

    def answer(self, tokens: tuple[int, ...], boundaries: tuple[int, ...]) -> "Answer":
        """Run a request of text alone to its end."""
        self._requests += 1
        return self.run(GenerationRequest(str(self._requests), tokens, ANSWER, boundaries=boundaries))

    def run(self, request: GenerationRequest) -> "Answer":
        """Run a request alone to its end."""
        began = time.perf_counter()
        first_s, cached = 0.0, 0
        answer = list[int]()
        self.engine.add(request)
        while len(self.engine):
            if not self.engine.needs_step:
                self._woken.wait(0.05)
                self._woken.clear()
                continue
            for outcome in self.engine.step().outcomes:
                if isinstance(outcome, Prefilled):
                    cached = outcome.cached
                elif isinstance(outcome, Sampled) and outcome.token is not None:
                    first_s = first_s or time.perf_counter() - began
                    answer.append(outcome.token)
        return Answer(first_s, cached, tuple(answer))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the prefix cache."""
        return self.engine.step().prefix.nbytes

    def close(self) -> None:
        """Write all prefixes to disk."""
        self.engine.close()

    def abandon(self) -> None:
        """End the threads of the disk tier without writing what is in memory."""
        if self._tier:
            self._tier.close(time.monotonic())


def tier_of(model: Model, folder: Path, wake: Callable[[], None], *, bits: int | None) -> DiskTier:
    """Open a disk tier without limits. `wake` and `bits`: see `DiskTier`."""
    options = StoreOptions(folder, 1 << 50)
    token_bytes = model.costs.token_bytes
    return DiskTier(model.network, model.cache_fingerprint, options, wake, bits=bits, token_bytes=token_bytes)


@dataclass(frozen=True, slots=True)
class Answer:
    """The measurements of one request."""

    first_token_s: float
    cached: int  # tokens
    tokens: tuple[int, ...]
