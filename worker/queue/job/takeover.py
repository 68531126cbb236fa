"""Decides when a worker may take over jobs of other workers whose leases expired."""

import time


class Takeover:
    """Forbids takeovers for one lease after an outage: no worker could renew its leases meanwhile, so those of live
    workers expired too, and these must have time to renew them."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._answered_at = self._allowed_from = time.monotonic()

    def record_first_answer(self, server_up_s: float) -> None:
        """Record the first answer of the server. An uptime of less than a lease counts as an outage."""
        self._answered_at = time.monotonic()
        if server_up_s < self._lease_s:
            self._allowed_from = self._answered_at + self._lease_s

    def record_answer(self) -> None:
        """Record an answer of the server."""
        self._answered_at = time.monotonic()

    def allowed(self) -> bool:
        """True if takeovers are allowed. Call it before each claim: half a lease without an answer is an outage."""
        now = time.monotonic()
        if now - self._answered_at > self._lease_s / 2:
            self._allowed_from = now + self._lease_s
        return now >= self._allowed_from
