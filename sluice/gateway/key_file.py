"""The key file: JSON with the hash, the tenant and the limits of each key.

    {"keys": [{"id": "k-5f2c9a01", "sha256": "...", "tenant": "acme", "requests_per_minute": 60}]}

A key is random and 256 bits long, so a plain SHA-256 of it cannot be reversed by guessing.
"""

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sluice.batch.store import locked_folder
from sluice.contract.keys import LANES, TENANT_CHARACTERS, Lane

logger = logging.getLogger("sluice.gateway")

Limit = Annotated[int, Field(ge=1, le=10**12)]
Name = Annotated[str, Field(min_length=1, max_length=TENANT_CHARACTERS)]


class BadKeyFile(Exception):
    """The key file cannot be read or is invalid; the message names the file and the first problem."""


class _UnreadableKeyFile(BadKeyFile):
    """The key file cannot be read: it is missing, or the system refused. Later it may be readable without a change."""


class Key(BaseModel):
    """One key. None as a limit is no limit, and None as `models` allows all of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: Name
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    batch_bytes: Limit | None = None  # of the tenant's stored files
    batch_runs: Limit | None = None  # of the tenant that wait or run
    lanes: tuple[Lane, ...] = LANES
    models: tuple[str, ...] | None = None
    expires: AwareDatetime | None = None
    created: AwareDatetime | None = None
    note: str = ""

    @field_validator("models")
    @classmethod
    def _are_whole_names(cls, models: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if pattern := next((name for name in models or () if "*" in name), None):
            raise ValueError(f"{pattern!r} has a *; write whole names, or no models for all of them")
        return models

    @property
    def is_limited(self) -> bool:
        """True if requests or tokens are counted."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    def has_expired(self, now: datetime) -> bool:
        """Return True if the key is no longer valid at this time."""
        return self.expires is not None and now >= self.expires


class KeyFile(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[Key, ...] = ()

    @model_validator(mode="after")
    def _has_no_duplicates(self) -> Self:
        for field in ("id", "sha256"):
            values = [getattr(key, field) for key in self.keys]
            if len(set(values)) < len(values):
                raise ValueError(f"two keys have the same {field}")
        return self


def key_digest(secret: str) -> str:
    """Return the hash of a key, as the file holds it."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def new_key(**fields: Any) -> tuple[str, Key]:
    """Return a new random key, and its entry for the file. Raises ValueError, with a field that is wrong and why."""
    secret = f"sk-sluice-{secrets.token_urlsafe(32)}"  # scanners for leaked secrets can recognize it
    now = datetime.now(UTC).replace(microsecond=0)
    try:
        return secret, Key(id=f"k-{secrets.token_hex(4)}", sha256=key_digest(secret), created=now, **fields)
    except ValidationError as error:
        raise ValueError(_describe(error)) from None


def read_key_file(path: Path) -> KeyFile:
    """Read and validate the file. Raises `BadKeyFile`; if it cannot be read, `_UnreadableKeyFile`."""
    try:
        return KeyFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise _UnreadableKeyFile(f"{path}: it cannot be read: {error.strerror}.") from None
    except ValidationError as error:
        raise BadKeyFile(f"{path}: {_describe(error)}.") from None


def _describe(error: ValidationError) -> str:
    """Return the first problem, with its place, without the value."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).removeprefix(".")
    return f"{place}: {problem['msg']}" if place else str(problem["msg"])


def edit(path: Path, change: Callable[[KeyFile], KeyFile]) -> None:
    """Replace the file by its changed content in one step; a missing file is created, for its owner only.

    Blocks while another process edits. Raises `BadKeyFile`, OSError, and the errors of `change`.
    """
    target = path.resolve()  # a link stays a link
    with locked_folder(target.parent):
        content = change(read_key_file(path) if path.exists() else KeyFile())
        _replace(target, content.model_dump_json(indent=2, exclude_none=True, exclude_defaults=True) + "\n")


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # for its owner only
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            _keep_owner(descriptor, path)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)  # if it has not taken the place of the old one


def _keep_owner(descriptor: int, path: Path) -> None:
    """Give the new file the owner of the old one, so that another user's gateway can still read what root edits."""
    if os.geteuid() == 0 and path.exists():
        os.fchown(descriptor, path.stat().st_uid, path.stat().st_gid)


class KeyStore:
    """Finds keys. A file that becomes invalid or unreadable leaves the previous keys in force, and is logged once."""

    def __init__(self, path: Path, check_s: float = 1.0) -> None:
        """Read the file. `check_s`: between two looks at it; a revoked key is refused after at most this time. Raises
        `BadKeyFile`."""
        self._path, self._check_s = path, check_s
        self._signature = _signature(path)
        self._by_digest = _by_digest(read_key_file(path))
        self._checked_at = time.monotonic()
        self._problem: str | None = None  # the last one that was logged, while it lasts

    async def find(self, secret: str) -> Key | None:
        """Return the key with this secret; None if there is none, or it has expired."""
        await self._reload_if_changed()
        key = self._by_digest.get(key_digest(secret))  # its time tells a client about digests alone, not about keys
        return None if key is None or key.has_expired(datetime.now(UTC)) else key

    async def _reload_if_changed(self) -> None:
        if time.monotonic() - self._checked_at < self._check_s:
            return
        self._checked_at = time.monotonic()
        signature = _signature(self._path)
        if signature == self._signature:
            return
        try:
            self._by_digest = _by_digest(await asyncio.to_thread(read_key_file, self._path))
        except _UnreadableKeyFile as error:
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


def _by_digest(file: KeyFile) -> dict[str, Key]:
    return {key.sha256: key for key in file.keys}


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Return what differs whenever the file was written or replaced; None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
