"""Who sends a request, and what the request may use."""

from dataclasses import dataclass

from sluice.wire import LANES


@dataclass(frozen=True)
class Caller:
    """The holder of a key. None as `models` allows all of them, and None as `tenant` is the operator: all jobs."""

    tenant: str | None = None
    key_id: str | None = None
    models: frozenset[str] | None = None  # names as requests give them
    lanes: frozenset[str] = frozenset(LANES)


LOCAL = Caller()  # every request, if no keys are configured
