"""A run's files: answers and failures, one line each, and the state that a resumed run needs. The result files are
authoritative for which lines are done."""

import fcntl
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sluice.batch.lines import custom_id_digest
from sluice.contract.batch import Batch, BatchUsage, InputTokens, OutputTokens, is_retry
from sluice.errors import BatchRefused, BatchTaken


class _RunCounts:
    """Counts of the lines in the result files, and their tokens."""

    def __init__(self) -> None:
        self.completed, self.retried = 0, 0
        self.cut_off = 0
        self.failures = Counter[str]()
        self._tokens = Counter[str]()

    @property
    def usage(self) -> BatchUsage:
        """Token counts of the answered lines."""
        into, out = self._tokens["prompt"], self._tokens["completion"]
        cached, reasoning = self._tokens["cached"], self._tokens["reasoning"]
        return BatchUsage(into, out, into + out, InputTokens(cached), OutputTokens(reasoning))

    def add(self, line: dict[str, Any]) -> None:
        """Count a line of the output or error file."""
        self.retried += is_retry(line["id"])
        match line:
            case {"error": {"code": str(code)}}:
                self.failures[code] += 1
            case {"response": {"body": dict(body)}}:
                self.completed += 1
                self.cut_off += _is_cut_off(body)
                self._add_usage(body.get("usage") or {})

    def _add_usage(self, usage: dict[str, Any]) -> None:
        self._tokens["prompt"] += usage.get("prompt_tokens", 0)
        self._tokens["completion"] += usage.get("completion_tokens", 0)
        self._tokens["cached"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self._tokens["reasoning"] += (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)


def _is_cut_off(body: dict[str, Any]) -> bool:
    match body:
        case {"choices": [{"finish_reason": "length"}, *_]}:
            return True
    return False


class _AppendOnlyFile:
    """A file of whole lines. Lines survive any crash once `append` has returned."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._end = os.fstat(self._file).st_size

    def close(self) -> None:
        """Close the file and release its lock."""
        os.close(self._file)

    def lock(self) -> bool:
        """Lock the file until `close` or the end of the process. False if another process holds or removed it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return os.fstat(self._file).st_nlink > 0

    def raw_lines(self) -> Iterator[bytes]:
        """Yield the lines, before the first `append`; then truncate a partial line at the end."""
        end = 0
        with self.path.open("rb") as file:
            for raw in file:
                if raw.endswith(b"\n"):
                    end += len(raw)
                    yield raw
        self._truncate(end)

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines and fsync. Raises OSError, and then the file is unchanged."""
        left = memoryview(b"".join(lines))
        try:
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError:
            self._truncate(self._end)
            raise
        self._end = os.fstat(self._file).st_size

    def _truncate(self, end: int) -> None:
        os.ftruncate(self._file, end)
        self._end = end


@dataclass(frozen=True, slots=True)
class LineError:
    """Code and message of a line that failed, and the HTTP response that OpenAI's interface gives for it. Its status is
    0 if no job of the line has ended."""

    code: str
    message: str
    status: int = 0
    body: bytes = b""  # JSON


@dataclass(frozen=True, slots=True)
class LineResult:
    """The outcome of one line: the result as a worker wrote it, or an error."""

    job_id: str
    custom_id: str
    result: bytes = b""
    error: LineError | None = None

    def as_line(self) -> bytes:
        """Return the line in OpenAI's output format, with its line break."""
        head = f'{{"id":{json.dumps(self.job_id)},"custom_id":{json.dumps(self.custom_id)},"response":'
        if self.error is None:
            return b"".join([head.encode(), self._response(200, self.result), b',"error":null}\n'])
        error = json.dumps({"code": self.error.code, "message": self.error.message})
        response = self._response(self.error.status, self.error.body) if self.error.status else b"null"
        return b"".join([head.encode(), response, f',"error":{error}}}\n'.encode()])

    def _response(self, status: int, body: bytes) -> bytes:
        head = f'{{"status_code":{status},"request_id":{json.dumps(self.job_id)},"body":'
        # JSON has line breaks between tokens only, never inside a string.
        return b"".join([head.encode(), body.replace(b"\n", b" "), b"}"])


class ResultFiles:
    """The output file and the error file. Each input line ends in one of them, once."""

    def __init__(self, output: Path, errors: Path) -> None:
        """Raises OSError, or `BatchRefused` if a file holds a line that no run wrote."""
        self._errors_path = errors
        self._output = _AppendOnlyFile(output)
        self._errors = _AppendOnlyFile(errors) if errors.exists() else None
        self.counts, self.done = _RunCounts(), set[bytes]()  # `done`: digests of the custom_ids in the files
        try:
            for file in filter(None, [self._output, self._errors]):
                self._load(file)
        except BatchRefused:
            self.close()
            raise

    def close(self) -> None:
        """Close both files."""
        for file in filter(None, [self._output, self._errors]):
            file.close()

    @property
    def errors_path(self) -> Path | None:
        """Path of the error file; None until it exists."""
        return self._errors_path if self._errors else None

    def add(self, results: Sequence[LineResult]) -> None:
        """Append results to the files, and fsync. Raises OSError; a result is counted only if its file has it."""
        answers = [result.as_line() for result in results if result.error is None]
        failures = [result.as_line() for result in results if result.error is not None]
        if answers:
            self._output.append(answers)
            self._count(answers)
        if failures:
            self._errors = self._errors or _AppendOnlyFile(self._errors_path)
            self._errors.append(failures)
            self._count(failures)

    def _count(self, lines: Sequence[bytes]) -> None:
        for raw in lines:
            self.counts.add(json.loads(raw))

    def _load(self, file: _AppendOnlyFile) -> None:
        for number, raw in enumerate(file.raw_lines(), 1):
            match _read(raw):
                case {"id": str(), "custom_id": str(custom_id)} as line:
                    self.done.add(custom_id_digest(custom_id))
                    self.counts.add(line)
                case _:
                    raise BatchRefused(f"line {number:,} of {file.path} was not written by a run")


def _read(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


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
        self._file = _AppendOnlyFile(path)
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


def read_state(path: Path) -> RunState | None:
    """Return the current state of a run that any process may feed; None if there is none. Raises OSError."""
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    try:
        return _parse(complete.rpartition(b"\n")[2])
    except (ValueError, KeyError, TypeError):
        return None


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
