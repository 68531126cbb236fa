"""Authentication: from a request to its caller."""

from starlette.requests import Request

from sluice.gateway.caller import Caller
from sluice.gateway.errors import ApiError
from sluice.gateway.keys.file import Key
from sluice.gateway.keys.limits import Limits
from sluice.gateway.keys.meter import Connections, Meter
from sluice.gateway.keys.store import KeyStore


class Authentication:
    """Checks the keys of requests."""

    def __init__(self, store: KeyStore, limits: Limits, max_connections: int) -> None:
        self._store, self._limits = store, limits
        self.connections = Connections(max_connections)

    async def caller(self, request: Request) -> Caller:
        """Return the caller, and count its connection. Raises `ApiError`: 401, and 429 for too many connections."""
        key = await self._store.find(secret_of(request))
        if key is None:
            message = "The API key is missing, wrong or expired; send `Authorization: Bearer KEY`."
            raise ApiError(401, message, code="invalid_api_key")
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
