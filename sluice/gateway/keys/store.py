"""The keys of a running gateway: read at its start, and again when the file changes."""

import asyncio
import hmac
import logging
import time
from datetime import UTC, datetime
from pathlib import Path

from sluice.gateway.keys.file import BadKeyFile, Key, KeyFile, UnreadableKeyFile, digest, read

logger = logging.getLogger("sluice.gateway")
CHECK_S = 1.0  # between two looks at the file: a revoked key is refused after at most this time
_BUCKET = 8  # characters of a hash: a lookup by them reveals nothing about the rest

Signature = tuple[int, int, int]  # differs whenever the file was written or replaced


class KeyStore:
    """Finds keys. A file that becomes invalid or unreadable leaves the previous keys in force, and is logged once."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises `BadKeyFile`."""
        self._path = path
        self._signature = _signature(path)
        self._by_hash = _by_hash(read(path))
        self._checked_at = time.monotonic()
        self._problem: str | None = None  # the last one that was logged, while it lasts

    async def find(self, secret: str) -> Key | None:
        """Return the key with this secret; None if there is none, or it has expired."""
        await self._reload_if_changed()
        wanted = digest(secret)
        for key in self._by_hash.get(wanted[:_BUCKET], ()):
            if hmac.compare_digest(key.sha256, wanted):
                return None if key.has_expired(datetime.now(UTC)) else key
        return None

    async def _reload_if_changed(self) -> None:
        if time.monotonic() - self._checked_at < CHECK_S:
            return
        self._checked_at = time.monotonic()
        signature = _signature(self._path)
        if signature == self._signature:
            return
        try:
            self._by_hash = _by_hash(await asyncio.to_thread(read, self._path))
        except UnreadableKeyFile as error:
            self._log_once(error)  # it is read again at the next check: without the signature it counts as changed
        except BadKeyFile as error:
            self._log_once(error)
            self._signature = signature
        else:
            self._problem = None
            self._signature = signature
            logger.info("%s was read again", self._path)

    def _log_once(self, error: BadKeyFile) -> None:
        if str(error) != self._problem:
            logger.error("%s The keys read before stay in force; correct the file.", error)
        self._problem = str(error)


def _by_hash(file: KeyFile) -> dict[str, list[Key]]:
    found = dict[str, list[Key]]()
    for key in file.keys:
        found.setdefault(key.sha256[:_BUCKET], []).append(key)
    return found


def _signature(path: Path) -> Signature | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
