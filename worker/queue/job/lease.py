"""Renews leases on a thread, which a busy event loop does not delay, and ends the process if it hangs."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable

import redis
from redis.exceptions import RedisError

from sluice.contract import keys
from worker.monitoring.heartbeat import Heartbeat
from worker.queue.job.claims import Claim, lease_key
from worker.queue.scripts import JOB_LIFE_MS, source
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")

EXIT_STALLED = 4


class LeaseKeeper:
    """Renews the leases of running jobs three times per lease, on a thread and a connection of its own: a busy event
    loop or a garbage collection costs no lease, and only a dead worker loses its jobs."""

    def __init__(
        self,
        settings: Settings,
        claims: Callable[[], Iterable[Claim]],
        on_lost: Callable[[Claim], None],
        heartbeats: Iterable[Heartbeat],
        on_stall: Callable[[], None] = lambda: os._exit(EXIT_STALLED),
    ) -> None:
        """`claims` returns the running claims, `on_lost` receives each claim that this worker no longer owns, and
        `on_stall` ends the process. All are called on the keeper's thread."""
        self._settings = settings
        self._claims = claims
        self._on_lost = on_lost
        self._on_stall = on_stall
        self._heartbeats = tuple(heartbeats)
        self._every_s = settings.lease_s / 3
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._redis = redis.Redis.from_url(
            settings.redis_url,
            socket_timeout=self._every_s,
            socket_connect_timeout=self._every_s,
        )
        self._renew = self._redis.register_script(source("renew"))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing. Returns at once; a renewal in progress is fenced, so it cannot harm a later attempt."""
        self._stop.set()

    def _run(self) -> None:
        """Renew until stopped. Any other end of this thread ends the process: its jobs would be taken over anyway."""
        try:
            self._renew_until_stopped()
        finally:
            if not self._stop.is_set():
                logger.critical("the thread that renews leases has ended: ending the process")
                self._on_stall()

    def _renew_until_stopped(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            slept_through = time.monotonic() - due > self._every_s
            due = time.monotonic() + self._every_s
            self._renew_all()
            if slept_through:  # the whole process was suspended, so old heartbeats mean nothing
                for heartbeat in self._heartbeats:
                    heartbeat.refresh()
            self._check_heartbeats()

    def _renew_all(self) -> None:
        claims = list(self._claims())
        if not claims:
            return
        try:
            for claim in self._renew_leases(claims):
                self._on_lost(claim)
        except (RedisError, OSError):
            pass  # retried in a third of a lease; after an outage the same call sets expired leases again
        except Exception:  # the border of this thread: a failed round does not prevent the next one
            logger.exception("leases were not renewed: trying again in %.1f s", self._every_s)

    def _renew_leases(self, claims: list[Claim]) -> list[Claim]:
        """Renew the leases. Returns the claims that this worker no longer owns."""
        names = [_as_bytes(name) for claim in claims for name in _keys_of(claim.job_id)]
        lease_ms, name = int(self._settings.lease_s * 1000), self._settings.worker_name
        answer = self._renew(keys=names, args=[lease_ms, JOB_LIFE_MS, name, *(c.attempt for c in claims)])
        return [claims[i - 1] for i in answer]

    def _check_heartbeats(self) -> None:
        """End the process if a heartbeat has stalled for longer than `watchdog_s`."""
        for heartbeat in self._heartbeats:
            if heartbeat.stalled_s() > self._settings.watchdog_s:
                logger.critical("the %s has hung for %.0f s: ending the process", heartbeat.name, heartbeat.stalled_s())
                self._on_stall()


def _keys_of(job_id: str) -> tuple[str, str, str]:
    return keys.job(job_id), lease_key(job_id), keys.log(job_id)


def _as_bytes(key: str) -> bytes:
    """Encode a key whose id may not be UTF-8. redis-py's blocking client ignores `encoding_errors` with hiredis."""
    return key.encode("utf-8", "surrogateescape")
