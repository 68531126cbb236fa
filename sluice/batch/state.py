"""The small file beside the output that holds a run together: what it is gone on with, and who feeds it."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sluice.batch.files import AppendOnlyFile
from sluice.batch.status import Batch
from sluice.errors import BatchRefused, BatchTaken


@dataclass(frozen=True, slots=True)
class RunState:
    """A stored state: the status, the digest of the input (empty until scanned) and the model mapping."""

    batch: Batch
    sha256: str  # of the input
    models: Mapping[str, str]


class StateFile:
    """A line for each state of the run; the last whole one is current.

    The process that holds the lock feeds the run. The kernel releases the lock when that process ends.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError, or `BatchTaken`."""
        self._file = AppendOnlyFile(path)
        if not self._file.lock():
            self._file.close()
            raise BatchTaken(f"{_feeder(path)} is feeding this run: {path} is locked")
        self._lines = list(self._file.raw_lines())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def load(self) -> RunState | None:
        """Return the current state, or None. Raises `BatchRefused` if no run wrote the file."""
        if not self._lines:
            return None
        try:
            return _saved(self._lines[-1])
        except (ValueError, KeyError, TypeError):
            raise BatchRefused(f"{self._file.path} is there already, and no run wrote it") from None

    def remove(self) -> None:
        """Delete the file of a run that did nothing. It stays locked until closed."""
        self._file.path.unlink(missing_ok=True)

    def save(self, saved: RunState) -> None:
        """Append a state. Raises OSError."""
        said = {
            "feeder": f"process {os.getpid()} on {socket.gethostname()}",
            "sha256": saved.sha256,
            "models": dict(saved.models),
            "batch": json.loads(saved.batch.to_json()),
        }
        self._lines.append(json.dumps(said, separators=(",", ":")).encode() + b"\n")
        self._file.append(self._lines[-1:])


def _saved(raw: bytes) -> RunState:
    said: dict[str, Any] = json.loads(raw)
    return RunState(Batch.from_json(json.dumps(said["batch"])), said["sha256"], said["models"])


def _feeder(path: Path) -> str:
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:  # it was locked by a run that was refused, and is gone
        return "another process"
    last = whole.rpartition(b"\n")[2]
    return str(json.loads(last)["feeder"]) if last else "another process"
