"""The file of a capture: lines of JSON, a head and then a job in each, so that a cut file keeps its whole lines."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Self, get_args

from sluice import __version__
from sluice.contract.events import parse_as
from sluice.contract.keys import JobFunction, is_job_id, is_model_name

_FORMAT = 1  # of the file; a later one may add fields


@dataclass(frozen=True, slots=True)
class CapturedJob:
    """A job as the server held it. What was gone, or not there yet, is empty."""

    id: str
    model: str
    lane: str = "interactive"
    function: JobFunction = "chat"
    state: str = ""
    request: dict[str, Any] | None = None
    body: str = ""  # as it was queued, of a job whose request cannot be read
    stored: dict[str, str] = field(default_factory=dict)  # fields of its hash
    events: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    worker: dict[str, Any] = field(default_factory=dict)  # versions, limits and settings of the one that ran it

    def __post_init__(self) -> None:
        """Check a job that was read from a file. Raises ValueError."""
        texts = all(isinstance(each, str) for each in (self.id, self.model, self.lane, self.state, self.body))
        if not (texts and is_job_id(self.id) and is_model_name(self.model) and self.function in get_args(JobFunction)):
            raise ValueError("id, model, function or another text of the job is absent or wrong")
        objects = [*self.events, self.stored, self.worker, self.request or {}, self.result or {}]
        if not all(isinstance(each, dict) for each in objects):
            raise ValueError("an event, the request, the result or the worker of the job is no JSON object")

    @property
    def ending(self) -> dict[str, Any] | None:
        """The final event; None if the job had not ended, or its events had expired."""
        last = self.events[-1] if self.events else {}
        return last if last.get("type") in ("finished", "failed", "cancelled") else None


class CaptureWriter:
    """Writes a file that its owner alone can read; each job is on disk when `write` returns."""

    def __init__(self, path: Path, *, redacted: bool) -> None:
        """Raises FileExistsError, or another OSError."""
        self._file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")
        self._path, self.jobs = path, 0
        try:
            self._line({"sluice_capture": _FORMAT, "created": time.time(), "sluice": __version__, "redacted": redacted})
        except OSError:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, and delete one without jobs."""
        try:
            self._file.close()  # a full disk raises here what it raised before
        finally:
            if not self.jobs:
                self._path.unlink(missing_ok=True)

    def write(self, job: CapturedJob) -> None:
        """Append a job. Raises OSError."""
        values = {each.name: getattr(job, each.name) for each in fields(job)}
        try:
            self._line(values)
        except RecursionError:  # a request that is nested deeper than any worker accepts
            self._line({**values, "request": None, "body": "(nested too deep to be stored)"})
        self.jobs += 1

    def _line(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


@dataclass(frozen=True, slots=True)
class Capture:
    """A file's jobs, and what is wrong with lines that hold none."""

    jobs: list[CapturedJob]
    problems: list[str]
    redacted: bool


def read_capture(path: Path) -> Capture:
    """Read a file. Raises OSError, and ValueError if it is not a capture or of a later format."""
    with path.open("rb") as file:
        head = _object(file.readline(65_536))
        version = head.get("sluice_capture")
        if not isinstance(version, int) or isinstance(version, bool):
            raise ValueError("it is not a capture: its first line must be that of a file by `sluice capture`")
        if version > _FORMAT:
            raise ValueError(f"its format is {version}, and this sluice reads {_FORMAT}; update sluice")
        found = list(_jobs(file))
    jobs = [each for each in found if isinstance(each, CapturedJob)]
    return Capture(jobs, [each for each in found if isinstance(each, str)], bool(head.get("redacted")))


def _jobs(file: BinaryIO) -> Iterator[CapturedJob | str]:
    for number, line in enumerate(file, 2):
        try:
            yield parse_as(CapturedJob, _object(line))
        except (ValueError, TypeError, RecursionError):
            what = "no job of a capture" if line.endswith(b"\n") else "cut"
            yield f"line {number} is {what}, and left out"


def _object(line: bytes) -> dict[str, Any]:
    """Parse a line; empty if it is not a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
