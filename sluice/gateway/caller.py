"""Who sends a request, and what the request may use."""

from dataclasses import dataclass, field

from sluice.gateway.keys.meter import Meter
from sluice.wire import LANES


@dataclass(frozen=True)
class Caller:
    """The holder of a key. None as `models` allows all of them, and None as `tenant` is the operator: all jobs."""

    tenant: str | None = None
    key_id: str | None = None
    models: frozenset[str] | None = None  # names as requests give them
    lanes: frozenset[str] = frozenset(LANES)
    meter: Meter | None = field(default=None, compare=False, repr=False)  # of this HTTP request


LOCAL = Caller()  # every request, if no keys are configured
