"""A run's files: answers and failures, one line each, and the state that a resumed run needs. The result files are
authoritative for which lines are done."""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

from sluice.batch.lines import custom_id_digest
from sluice.batch.outcomes import ANSWERS, OutcomeTally, details_of_line, is_better
from sluice.batch.source import kept_path, parse_window
from sluice.contract.batch import Batch, LineDetails, retry_of
from sluice.contract.events import check_of
from sluice.errors import BatchRefused, BatchTaken

_FOREIGN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # for what no run wrote


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

    @property
    def end(self) -> int:
        """Size of the whole lines in bytes."""
        return self._end

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the file."""
        return os.pread(self._file, length, offset)

    def raw_lines(self) -> Iterator[bytes]:
        """Yield the lines, before the first `append`; then truncate a partial line at the end."""
        end = 0
        os.lseek(self._file, 0, os.SEEK_SET)
        with open(self._file, "rb", closefd=False) as file:  # not by its path: the folder of a run moves
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
    details: LineDetails | None = None

    def as_line(self) -> bytes:
        """Return the line in OpenAI's output format, with its line break."""
        head = f'{{"id":{json.dumps(self.job_id)},"custom_id":{json.dumps(self.custom_id)},"response":'
        tail = "}\n" if self.details is None else f',"sluice":{_compact(asdict(self.details))}}}\n'
        if self.error is None:
            return b"".join([head.encode(), self._response(200, self.result), f',"error":null{tail}'.encode()])
        error = json.dumps({"code": self.error.code, "message": self.error.message})
        response = self._response(self.error.status, self.error.body) if self.error.status else b"null"
        return b"".join([head.encode(), response, f',"error":{error}{tail}'.encode()])

    def _response(self, status: int, body: bytes) -> bytes:
        head = f'{{"status_code":{status},"request_id":{json.dumps(self.job_id)},"body":'
        # JSON has line breaks between tokens only, never inside a string.
        return b"".join([head.encode(), body.replace(b"\n", b" "), b"}"])


@dataclass(frozen=True, slots=True)
class KeptLine:
    """A line that is run again: its last outcome, and its best so far."""

    retry: int  # number of its next job
    mends: int  # how many times the run's options have run it again
    changes: Mapping[str, Any]  # to its request, which led to the last outcome
    last: LineDetails
    best: LineDetails
    offset: int  # of the record of the best
    length: int


class _KeptOutcomes:
    """The file of outcomes that are kept while their lines are run again, so that a crash loses none of them and no
    resumed run repeats them. Its records stay when the lines have ended."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, or `BatchRefused` if the file holds a record that no run wrote."""
        self.path = path
        self._file = _AppendOnlyFile(path) if path.exists() else None
        self._lines = dict[bytes, KeptLine]()
        self.outcomes = list[tuple[str, LineDetails]]()  # with their job ids
        offset = 0
        for number, raw in enumerate(self._file.raw_lines() if self._file else (), 1):
            try:
                self._load(raw, offset)
            except _FOREIGN:
                self.close()
                raise BatchRefused(f"line {number:,} of {path} was not written by a run") from None
            offset += len(raw)

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()

    def get(self, digest: bytes) -> KeptLine | None:
        """Return the line of this custom_id; None if it was not run again."""
        return self._lines.get(digest)

    def add(self, records: Sequence[bytes]) -> None:
        """Append records, and fsync. Raises OSError."""
        if not records:
            return
        self._file = self._file or _AppendOnlyFile(self.path)
        offset = self._file.end
        self._file.append(records)
        for raw in records:
            self._load(raw, offset)
            offset += len(raw)

    def best_line(self, kept: KeptLine, job_id: str) -> bytes:
        """Return the line of the best outcome. Its id is that of the line's last job."""
        assert self._file is not None
        line = self._file.read(kept.offset, kept.length).partition(_LINE)[2].removesuffix(b"}\n")
        _, comma, rest = line.partition(b',"custom_id":')
        return b"".join([f'{{"id":{json.dumps(job_id)}'.encode(), comma, rest, b"\n"])

    def _load(self, raw: bytes, offset: int) -> None:
        record = json.loads(raw)
        line = record["line"]
        digest, details = custom_id_digest(line["custom_id"]), details_of_line(line)
        best = details, offset, len(raw)
        if (before := self._lines.get(digest)) and is_better(before.best, details):
            best = before.best, before.offset, before.length
        kept = KeptLine(record["retry"], record["mends"], record["changes"], details, *best)
        job_id = (line["response"] or {}).get("request_id", "")
        if not (check_of(KeptLine)(kept) and isinstance(job_id, str)):
            raise TypeError
        self._lines[digest] = kept
        if job_id:
            self.outcomes.append((job_id, details))


_LINE = b',"line":'  # in the JSON before it, a quote within a string has a backslash


def kept_record(line: bytes, retry: int, mends: int = 0, changes: Mapping[str, Any] | None = None) -> bytes:
    """Return the record of an outcome that is kept, of its line in a result file; see `KeptLine`."""
    head = _compact({"retry": retry, "mends": mends, "changes": dict(changes or {})})
    return b"".join([head[:-1].encode(), _LINE, line.removesuffix(b"\n"), b"}\n"])


class ResultFiles:
    """The output file and the error file. Each input line ends in one of them, once, with its best outcome."""

    def __init__(self, output: Path, errors: Path) -> None:
        """Raises OSError, or `BatchRefused` if a file holds a line that no run wrote."""
        self._errors_path = errors
        self._kept = _KeptOutcomes(kept_path(output))
        self._output = _AppendOnlyFile(output)
        self._errors = _AppendOnlyFile(errors) if errors.exists() else None
        self.counts, self.done = OutcomeTally(), set[bytes]()  # `done`: digests of the custom_ids in the files
        for job_id, details in self._kept.outcomes:
            self.counts.keep(job_id, details)
        try:
            for file in filter(None, [self._output, self._errors]):
                self._load(file)
        except BatchRefused:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._kept.close()
        for file in filter(None, [self._output, self._errors]):
            file.close()

    @property
    def errors_path(self) -> Path | None:
        """Path of the error file; None until it exists."""
        return self._errors_path if self._errors else None

    def kept(self, digest: bytes) -> KeptLine | None:
        """Return the line of this custom_id if it is run again; None if it was never run."""
        return self._kept.get(digest)

    def keep(self, records: Sequence[bytes]) -> None:
        """Keep outcomes of lines that are run again, as `kept_record` has them, and fsync. Raises OSError."""
        first = len(self._kept.outcomes)
        self._kept.add(records)
        for job_id, details in self._kept.outcomes[first:]:
            self.counts.keep(job_id, details)

    def add(self, results: Sequence[LineResult]) -> None:
        """Append results, or better ones that are kept, to the files, and fsync. Raises OSError; a result is counted
        only if its file has it."""
        best = [self._best(result) for result in results]
        answers = [line for line, is_answer in best if is_answer]
        failures = [line for line, is_answer in best if not is_answer]
        if answers:
            self._output.append(answers)
            self._count(answers)
        if failures:
            self._errors = self._errors or _AppendOnlyFile(self._errors_path)
            self._errors.append(failures)
            self._count(failures)

    def _best(self, result: LineResult) -> tuple[bytes, bool]:
        """Return the line of the best outcome, and True if it is an answer."""
        line = result.as_line()
        if kept := self._kept.get(custom_id_digest(result.custom_id)):
            details = result.details or details_of_line(json.loads(line))
            never_ran = result.error is not None and not result.error.status
            if is_better(kept.best, details) or (never_ran and not is_better(details, kept.best)):
                return self._kept.best_line(kept, result.job_id), kept.best.kind in ANSWERS
        return line, result.error is None

    def _count(self, lines: Sequence[bytes]) -> None:
        for raw in lines:
            self.counts.add(json.loads(raw))

    def _load(self, file: _AppendOnlyFile) -> None:
        for number, raw in enumerate(file.raw_lines(), 1):
            try:
                line = json.loads(raw)
                self.done.add(custom_id_digest(line["custom_id"]))
                self.counts.add(line)
            except _FOREIGN:
                raise BatchRefused(f"line {number:,} of {file.path} was not written by a run") from None


def take_back(output: Path, errors: Path, kinds: Collection[str]) -> None:
    """Move the lines of these kinds from the result files to the kept outcomes, to be run again. Blocks.

    The lines are kept before they leave their file. Repeated after a crash, it moves those that are left. Raises
    OSError, or `BatchRefused` if a file holds a line that no run wrote.
    """
    with closing(ResultFiles(output, errors)) as results:  # checks the lines, and drops a partial one
        for path in filter(None, [output.resolve(), results.errors_path and results.errors_path.resolve()]):
            rest = path.with_name(f".{path.name}.rest")
            with path.open("rb") as file, rest.open("wb") as left:
                while raw := list(islice(file, 100)):
                    lines = [(line, json.loads(line)) for line in raw]
                    wanted = [(line, said["id"]) for line, said in lines if details_of_line(said).kind in kinds]
                    results.keep([kept_record(line, retry_of(job_id) + 1) for line, job_id in wanted])
                    left.writelines(line for line, said in lines if details_of_line(said).kind not in kinds)
                left.flush()
                os.fsync(left.fileno())
            shutil.copymode(path, rest)
            rest.replace(path)
    if errors.exists() and not errors.stat().st_size:
        errors.unlink()


@dataclass(frozen=True, slots=True)
class RunState:
    """A stored state: the status, the digest of the input (empty until scanned) and the model mapping."""

    batch: Batch
    sha256: str  # of the input
    models: Mapping[str, str]
    rerun: tuple[str, ...] = ()  # kinds of lines that are to be taken back before the run goes on
    earlier_s: float = 0.0  # what the run took before it was run again
    remote: str = ""  # URL of the server over HTTP that has the run; its files are ids there


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
        self.close()

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def load(self) -> RunState | None:
        """Return the current state; None for a new file. Raises `BatchRefused` if no run wrote the file."""
        if not self._lines:
            return None
        try:
            return _parse(self._lines[-1])
        except _FOREIGN:
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
            "rerun": state.rerun,
            "earlier_s": state.earlier_s,
            **({"remote": state.remote} if state.remote else {}),
            "batch": json.loads(state.batch.to_json()),
        }
        self._lines.append(_compact(stored).encode() + b"\n")
        self._file.append(self._lines[-1:])


def read_state(path: Path) -> RunState | None:
    """Return the current state of a run that any process may feed; None if there is none. Raises OSError."""
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    try:
        return _parse(complete.rpartition(b"\n")[2])
    except _FOREIGN:
        return None


def _parse(raw: bytes) -> RunState:
    stored: dict[str, Any] = json.loads(raw)
    batch, rerun = Batch.from_json(json.dumps(stored["batch"])), tuple(stored.get("rerun", ()))
    earlier_s, remote = stored.get("earlier_s", 0.0), stored.get("remote", "")
    state = RunState(batch, stored["sha256"], stored["models"], rerun, earlier_s, remote)
    if not remote:  # else the status is another server's
        parse_window(batch.completion_window)
        f"{batch.id}{batch.sluice.tenant}".encode()  # they are parts of keys
        if not check_of(RunState)(state):
            raise TypeError
    return state


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _feeder(path: Path) -> str:
    try:
        complete, _, _ = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:  # deleted by a run that was refused
        return "another process"
    last = complete.rpartition(b"\n")[2]
    return str(json.loads(last)["feeder"]) if last else "another process"
