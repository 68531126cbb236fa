"""The state file next to the output: what a resumed run needs, and a lock that one feeder holds."""

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
    """A file with one line for each state of the run; the last complete line is current.

    The process that holds the lock feeds the run. The kernel releases the lock when that process ends.
    """

    def __init__(self, path: Path) -> None:
        """Open and lock the file. Raises OSError, or `BatchTaken` if another process holds the lock."""
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
        """Return the current state; None for a new file. Raises `BatchRefused` if no run wrote the file."""
        if not self._lines:
            return None
        try:
            return _parse(self._lines[-1])
        except (ValueError, KeyError, TypeError):
            raise BatchRefused(f"{self._file.path} already exists, and was not written by a run") from None

    def remove(self) -> None:
        """Delete the file of a run that did nothing. It stays locked until closed."""
        self._file.path.unlink(missing_ok=True)

    def save(self, state: RunState) -> None:
        """Append a state. Raises OSError."""
        stored = {
            "feeder": f"process {os.getpid()} on {socket.gethostname()}",
            "sha256": state.sha256,
            "models": dict(state.models),
            "batch": json.loads(state.batch.to_json()),
        }
        self._lines.append(json.dumps(stored, separators=(",", ":")).encode() + b"\n")
        self._file.append(self._lines[-1:])


def _parse(raw: bytes) -> RunState:
    stored: dict[str, Any] = json.loads(raw)
    return RunState(Batch.from_json(json.dumps(stored["batch"])), stored["sha256"], stored["models"])


def _feeder(path: Path) -> str:
    try:
        complete, _, _ = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:  # deleted by a run that was refused
        return "another process"
    last = complete.rpartition(b"\n")[2]
    return str(json.loads(last)["feeder"]) if last else "another process"
