"""The caller of a request: its tenant, the models and lanes that its key allows, and the key's limits."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.gateway.keys.meter import Meter
from sluice.gateway.protection.memory import HeldBytes, Memory
from sluice.wire import LANES


def _unlimited() -> HeldBytes:
    return Memory(2**63, 2**63).hold(None)


@dataclass(frozen=True)
class Caller:
    """The holder of a key. None as `models` allows all of them, and None as `tenant` is the operator: all jobs."""

    tenant: str | None = None
    key_id: str | None = None
    models: frozenset[str] | None = None  # names as requests give them
    lanes: frozenset[str] = frozenset(LANES)
    meter: Meter | None = field(default=None, compare=False, repr=False)  # of this HTTP request
    held: HeldBytes = field(default_factory=_unlimited, compare=False, repr=False)  # by this HTTP request

    def count_choices(self, choices: int) -> None:
        """Count each choice of the answer as a connection of the key. Raises `ApiError` 429."""
        if self.meter is not None:
            self.meter.count_choices(choices)

    async def count_request(self) -> None:
        """Count a request that queues no job for the limit of the key. Raises `ApiError` 429, and `SluiceError`."""
        if self.meter is not None:
            await self.meter.count()

    async def reserve(self, job_ids: Sequence[str], tokens: int) -> None:
        """Count a request and reserve tokens for each job. Raises as `Meter.reserve`."""
        if self.meter is not None:
            await self.meter.reserve(job_ids, tokens)

    async def release(self, job_ids: Sequence[str]) -> None:
        """Return the tokens that this request has reserved for jobs that were not queued."""
        if self.meter is not None:
            await self.meter.release(job_ids)


LOCAL = Caller()  # every request, if no keys are configured
