"""The caller of a request, by its key: its tenant, the models and lanes that the key allows, and the key's limits."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from sluice.contract.keys import LANES
from sluice.gateway.errors import ApiError
from sluice.gateway.keys.file import Key
from sluice.gateway.keys.limits import Limits
from sluice.gateway.keys.meter import Connections, Meter
from sluice.gateway.keys.store import KeyStore
from sluice.gateway.protection.memory import HeldBytes, Memory
from sluice.http_errors import ErrorForm


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


class Authentication:
    """Checks the keys of requests."""

    def __init__(self, store: KeyStore, limits: Limits, max_connections: int) -> None:
        self._store, self._limits = store, limits
        self.connections = Connections(max_connections)

    async def caller(self, request: Request) -> Caller:
        """Return the caller, and count its connection. Raises `ApiError`: 401, and 429 for too many connections."""
        key = await self._store.find(secret_of(request))
        if key is None:
            message = "it is missing, wrong or expired; send `Authorization: Bearer KEY`."
            raise ApiError(ErrorForm.INVALID_API_KEY, message)
        state = request.scope.setdefault("state", {})
        if "meter" not in state:  # a request may be authenticated more than once
            state["meter"] = Meter(key, self._limits, self.connections)
        return caller_of(key, state["meter"])


def secret_of(request: Request) -> str:
    """Return the key that a request carries, in OpenAI's header or in Anthropic's; empty if it has none."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    return request.headers.get("x-api-key", "").strip()


def caller_of(key: Key, meter: Meter) -> Caller:
    """Return what the holder of the key may do."""
    models = None if key.models is None else frozenset(key.models)
    return Caller(key.tenant, key.id, models, frozenset(key.lanes), meter)
