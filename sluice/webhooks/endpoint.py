"""An endpoint of webhooks: what it wants, how its requests are signed, and when a failed one is sent again."""

import base64
import hashlib
import hmac
import json
import random
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

EVENTS = (
    *(f"batch.{state}" for state in ("completed", "failed", "cancelled", "expired")),
    *(f"response.{state}" for state in ("completed", "failed", "cancelled", "incomplete")),
    *(f"job.{state}" for state in ("finished", "failed", "cancelled")),
)
# From the end of an attempt to the next: the specification's example, as far as it fits into a day.
_DELAYS_S = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0)


def read_events(names: Sequence[str]) -> tuple[str, ...]:
    """Return the events of these names; `batch.*` stands for all that begin so. Raises ValueError."""
    found = dict[str, None]()
    for name in names:
        kind = name.removesuffix("*")
        named = [event for event in EVENTS if event == name or (kind.endswith(".") and event.startswith(kind))]
        if not named:
            raise ValueError(
                f"there is no event {name[:80]!r}; use some of {', '.join(EVENTS)}, or one such as batch.*"
            )
        found |= dict.fromkeys(named)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret that requests are signed with."""

    value: str
    until_ms: int | None = None  # it was replaced, and signs until then

    @classmethod
    def new(cls) -> Self:
        """Return a random secret, in the form of the specification."""
        return cls(f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A URL that events are sent to."""

    id: str
    url: str
    events: tuple[str, ...]
    tenant: str | None  # whose events it gets; None: of all
    allow_private: bool  # the URL may be of http, or lead to an address that is not public
    created_at: int
    secrets: tuple[Secret, ...]  # the newest first
    disabled: str | None = None  # why it gets no events

    @classmethod
    def new(cls, url: str, events: Sequence[str], tenant: str | None, *, allow_private: bool, created_at: int) -> Self:
        """Return a new endpoint with a secret of its own."""
        return cls(
            f"we_{uuid.uuid4().hex[:12]}", url, tuple(events), tenant, allow_private, created_at, (Secret.new(),)
        )

    def rotated(self, now_ms: int, overlap_ms: int) -> Self:
        """Return the endpoint with a new secret. Those before it, at most two, sign for `overlap_ms` more, but for no
        longer than they would have."""
        until_ms = now_ms + overlap_ms
        older = [replace(each, until_ms=min(each.until_ms or until_ms, until_ms)) for each in self._signing(now_ms)]
        return replace(self, secrets=(Secret.new(), *(older[:2] if overlap_ms else ())))

    def headers(self, event_id: str, body: bytes, now_ms: int) -> dict[str, str]:
        """Return the headers of a request, signed with each secret that is valid now."""
        timestamp = str(now_ms // 1000)
        signed = b".".join((event_id.encode(), timestamp.encode(), body))
        return {
            "webhook-id": event_id,
            "webhook-timestamp": timestamp,
            "webhook-signature": " ".join(_signature(each.value, signed) for each in self._signing(now_ms)),
        }

    def _signing(self, now_ms: int) -> list[Secret]:
        return [each for each in self.secrets if each.until_ms is None or each.until_ms > now_ms]

    def to_json(self) -> str:
        """Return the endpoint as it is stored; what is None is left out, which Lua would take for a value."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def from_json(cls, raw: bytes) -> Self | None:
        """Parse a stored endpoint; None for a value that another program wrote."""
        try:
            read: dict[str, Any] = {"tenant": None, **json.loads(raw)}
            kept = tuple(Secret(each["value"], each["until_ms"]) for each in read["secrets"])
            known = {name: value for name, value in read.items() if name in cls.__slots__}
            return cls(**{**known, "events": tuple(read["events"]), "secrets": kept})
        except (ValueError, TypeError, KeyError):
            return None

    def shown(self) -> dict[str, Any]:
        """Return the endpoint without its secrets."""
        return {name: value for name, value in asdict(self).items() if name != "secrets"}


def _signature(secret: str, signed: bytes) -> str:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    return f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}"


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event for an endpoint, which waits or is a dead letter."""

    id: str  # of the event
    type: str
    body: str
    attempts: int
    since_ms: int  # of the first attempt
    problem: str = ""  # of the last attempt

    def to_json(self) -> str:
        """Return the delivery as it is stored."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: bytes) -> Self | None:
        """Parse a stored delivery; None for a value that another program wrote."""
        try:
            read: Mapping[str, Any] = json.loads(raw.decode("utf-8", "replace"))
            return cls(**{name: read[name] for name in cls.__slots__ if name in read})
        except (ValueError, TypeError):
            return None

    def next_attempt_ms(self, now_ms: int, retry_after_s: float) -> int | None:
        """Return when to try again after a failed attempt; None after the last one, a day after the first."""
        last_ms = self.since_ms + 86_400_000
        if now_ms >= last_ms:
            return None
        if self.attempts >= len(_DELAYS_S):
            return last_ms
        jittered_s = _DELAYS_S[self.attempts] * random.uniform(1.0, 1.1)  # what failed together comes apart
        return min(now_ms + round(max(jittered_s, retry_after_s) * 1000), last_ms)
