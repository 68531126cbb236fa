"""What this worker says of itself to the claims of the others: how busy it is, and which prefixes it holds."""

import logging
import re
import secrets
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from redis.asyncio import Redis

from sluice.contract import keys
from worker.monitoring.sink import MetricsSink
from worker.queue.redis_server import ServerClock
from worker.queue.scripts import arguments, script
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")

_CLASSES_S = (0.25, 1.0, 4.0)  # prompts are counted by the seconds left of each: below these, and more
_MAX_FORGOTTEN = 500  # marks in one call of the script: about 1 ms of the server's time


class EnginePrompts(Protocol):
    """What the engine tells of prompts and of its prefix cache. `EngineThread` has it."""

    def prompt_cost(self) -> tuple[float, float]:
        """Return the measured seconds of a prompt's token, and of each pair of a token and one before it."""

    def take_lost(self) -> tuple[list[str], bool]:
        """Return the marks whose tokens the prefix cache has lost since the last call, and if it has lost all."""

    def marks(self) -> int:
        """Return the number of marks whose tokens the prefix cache holds."""


class _Unknown:
    """An engine that tells nothing."""

    def prompt_cost(self) -> tuple[float, float]:
        return 1 / 2000, 0.0  # as `CostEstimate` assumes before any measurement

    def take_lost(self) -> tuple[list[str], bool]:
        return [], False

    def marks(self) -> int:
        return 0


@dataclass(slots=True)
class JobPrompt:
    """The prompt of a claimed job until its first token: how much of it is left to compute."""

    nbytes: int = 0  # of the body, from its messages on; 0: not known
    hinted: int = 0  # tokens that the claim expected in the prefix cache
    marks: tuple[tuple[str, int], ...] = ()  # names of beginnings of the body, and where they end in it
    tokens: int = 0  # of the prompt; 0: it is not tokenized yet
    done: int = 0  # tokens that are computed, or were found in the cache
    is_computed: bool = False

    def token_marks(self, tokens: int) -> tuple[tuple[str, int], ...]:
        """Return the marks with their ends in a prompt of so many tokens."""
        return tuple((mark, end * tokens // self.nbytes) for mark, end in self.marks if end <= self.nbytes)


class FleetRecord:
    """Measures this worker for the claims of the others, and publishes it. All methods are for the event loop."""

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        clock: ServerClock,
        metrics: MetricsSink,
        engine: EnginePrompts | None = None,
        *,
        affinity: bool = True,
    ) -> None:
        """`affinity`: if False, the worker says nothing (`SLUICE_AFFINITY`)."""
        self._redis, self._clock, self._metrics = redis, clock, metrics
        self.affinity = affinity

    def said(self, free_rows: int) -> tuple[str, str, int]:
        """Return the worker's id, its record (as `keys.fleet` describes it), and when it will be done with its prompts,
        in Unix milliseconds. `free_rows`: that interactive jobs may still take; 0 for a worker that stops. Without
        affinity, the texts are empty and the time is 0."""
        return "", "", 0

    def claimed(self, job_id: str, marks: str, bytes_: int, expected_tokens: int) -> None:
        """Count the prompt of a claimed job as work, until it is computed or the job ends. `marks`: "mark end mark
        end ..." as in the job's hash, `bytes_`: of the body, from its messages on; both 0 or empty if not known.
        `expected_tokens`: of the prompt, which the claim takes to be in this worker's prefix cache."""

    def counted(
        self, *, cache: int = 0, load: int = 0, overruled_s: Sequence[float] = (), scanned: int = 0, seconds: float = 0.0
    ) -> None:
        """Count a claim in the metrics. `cache`, `load`: jobs that it left to a worker that holds more of their prompts
        than this one, or that is less busy. `overruled_s`: of each job that it took although another worker would have
        been better, the seconds that the job has waited. `scanned`: jobs looked at. `seconds`: of the whole call."""
