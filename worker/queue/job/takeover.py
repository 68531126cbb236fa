"""When a worker may take over the jobs of others whose leases ran out."""

import time


class Takeover:
    """Not in the first lease after an outage. While the server was away nobody could renew, so the leases of
    workers that live ran out too, and these come first."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._answered_at = self._from = time.monotonic()

    def met(self, server_up_s: float) -> None:
        """The server answers for the first time; it may have come back just now."""
        self._answered_at = time.monotonic()
        if server_up_s < self._lease_s:
            self._from = self._answered_at + self._lease_s

    def answered(self) -> None:
        self._answered_at = time.monotonic()

    def allowed(self) -> bool:
        """To be asked before each claim: half a lease without an answer counts as an outage."""
        now = time.monotonic()
        if now - self._answered_at > self._lease_s / 2:
            self._from = now + self._lease_s
        return now >= self._from
