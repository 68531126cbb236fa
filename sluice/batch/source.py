"""An input file. It is scanned once, never whole in memory; then each line is read again when it is queued."""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any, BinaryIO, Self

from sluice.batch.endpoints import Endpoint
from sluice.batch.lines import BadLine, Models, Request, read_line
from sluice.batch.outcomes import read_kinds
from sluice.batch.pace import OpenHours
from sluice.contract.batch import Problem, new_run_id
from sluice.contract.keys import MAX_REQUEST_BYTES
from sluice.errors import BatchRefused
from sluice.presence import mapping_pair
from sluice.wording import counted

MAX_LINES = 50_000  # of a file: OpenAI's limits
MAX_FILE_BYTES = 200 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """Position of a request in the file, in bytes, and the data to schedule it."""

    number: int  # from 1
    offset: int
    length: int
    model: str
    digest: bytes  # of the custom_id
    prefix: bytes  # sorts lines with a common prompt prefix together


@dataclass(slots=True)
class FileScan:
    """The contents of a file. If there are problems, no line is run."""

    lines: list[Line] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    num_unlisted: int = 0  # problems that are counted only
    sha256: str = ""
    named_models: set[str] = field(default_factory=set)  # the names in the mapping that lines use
    endpoint: Endpoint | None = None  # of all lines
    models: set[str] = field(default_factory=set)  # the served names of all lines

    @property
    def num_requests(self) -> int:
        """Number of lines so far, good and bad."""
        return len(self.lines) + len(self.problems) + self.num_unlisted

    def add(self, problem: Problem) -> None:
        """Add a problem; after the first thousand they are only counted, to limit the size of the status object."""
        if len(self.problems) < 1_000:
            self.problems.append(problem)
        else:
            self.num_unlisted += 1

    def listed_problems(self) -> tuple[Problem, ...]:
        """Return the problems, with one for those counted only."""
        if not self.num_unlisted:
            return tuple(self.problems)
        return (
            *self.problems,
            Problem(
                "more_errors",
                f"{counted(self.num_unlisted, 'more line')} {'is' if self.num_unlisted == 1 else 'are'} invalid.",
            ),
        )


@dataclass(frozen=True, slots=True)
class _Raw:
    number: int
    offset: int
    text: bytes  # with its line break; cut if it is too long

    @property
    def has_line_break(self) -> bool:
        return self.text.endswith(b"\n")


class Source:
    """An open input file. Raises `BatchRefused` if it cannot be read.

    `allowed`: the names of models that lines may have, as they are in the file or as they are served. `url`: that all
    lines must have; None: that of the first one.
    """

    def __init__(
        self, path: Path, models: Models, allowed: Collection[str] | None = None, url: str | None = None
    ) -> None:
        self._allowed = allowed
        self._path, self._models = path, models
        self._url = url
        try:
            if (
                path.exists() and not path.is_file()
            ):  # checked first, since opening a pipe blocks until a writer opens it
                raise BatchRefused(f"{path} is not a regular file: each line is read again when it is queued")
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise BatchRefused(f"cannot read {path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def scan(self, *, max_lines: int = MAX_LINES, max_bytes: int = MAX_FILE_BYTES) -> FileScan:
        """Check every line, in file order. Blocks while it reads the file."""
        found, first_lines = FileScan(), dict[bytes, int]()
        if (size := os.fstat(self._file.fileno()).st_size) > max_bytes:
            found.add(Problem("file_too_large", f"the file is {size:,} bytes; the limit is {max_bytes:,}."))
            return found
        sha256 = hashlib.sha256()
        for raw in self._raw_lines(sha256):
            is_blank = not raw.text.strip()
            if found.num_requests == max_lines and not is_blank:
                found.add(Problem("too_many_lines", f"there are more than {max_lines:,} requests.", raw.number))
                break
            if raw.number > 20 * max_lines:
                message = f"there are more than {20 * max_lines:,} lines, most of them blank."
                found.add(Problem("too_many_lines", message, raw.number))
                break
            if is_blank:
                continue
            try:
                found.lines.append(self._line(raw, first_lines, found))
            except BadLine as bad:
                found.add(Problem(bad.code, bad.message, raw.number, bad.param))
        if not found.lines and not found.problems:
            found.add(Problem("empty_file", "the file has no request."))
        found.sha256 = sha256.hexdigest()
        return found

    def sha256(self) -> str:
        """Return the digest of the whole file, equal to that of `scan`. Blocks while it reads the file."""
        self._file.seek(0)
        sha256 = hashlib.sha256()
        while read := self._file.read(1 << 20):
            sha256.update(read)
        return sha256.hexdigest()

    def request(self, line: Line) -> Request:
        """Read a line again. Raises `BatchRefused` if the file has changed since the scan."""
        try:
            request = read_line(os.pread(self._file.fileno(), line.length, line.offset), self._models)
        except BadLine:
            raise self._changed() from None
        if request.digest != line.digest:
            raise self._changed()
        return request

    def _changed(self) -> BatchRefused:
        return BatchRefused(f"{self._path} was changed while it ran")

    def _raw_lines(self, sha256: "hashlib._Hash") -> Iterator[_Raw]:
        self._file.seek(0)
        offset, number = self._skip_bom(sha256), 0
        while text := self._file.readline(MAX_REQUEST_BYTES + 1):
            number += 1
            length = len(text)
            sha256.update(text)
            yield _Raw(number, offset, text)
            if length > MAX_REQUEST_BYTES and not text.endswith(b"\n"):
                length += self._skip_line(sha256)
            offset += length

    def _skip_bom(self, sha256: "hashlib._Hash") -> int:
        first = self._file.read(len(_BOM))
        if first == _BOM:
            sha256.update(first)
            return len(_BOM)
        self._file.seek(0)
        return 0

    def _skip_line(self, sha256: "hashlib._Hash") -> int:
        length = 0
        while text := self._file.readline(MAX_REQUEST_BYTES):
            sha256.update(text)
            length += len(text)
            if text.endswith(b"\n"):
                break
        return length

    def _line(self, raw: _Raw, first_lines: dict[bytes, int], found: FileScan) -> Line:
        request = self._read(raw)
        wanted = self._url or (found.endpoint or request.endpoint).url
        if request.endpoint.url != wanted:
            of = "the batch's endpoint" if self._url else "that of the lines before"
            message = f"the url is {request.endpoint.url}, and {of} is {wanted}: a file has one"
            raise BadLine("mixed_urls", f"{message}, so divide it.", "url")
        found.endpoint = request.endpoint
        if request.named_model is not None and (pair := mapping_pair(request.named_model, self._models)):
            found.named_models.add(pair)
        if self._allowed is not None and not {request.named_model, request.model} & {*self._allowed}:
            message = f"the key that created this run may not use the model {request.model}."
            raise BadLine("model_not_allowed", message, "body.model")
        most = 100  # each has a window of lines on the server, and is counted in the status
        if request.model not in found.models and len(found.models) == most:
            message = f"a file has at most {most} models, and {request.model} is one more: divide it, or map names."
            raise BadLine("too_many_models", message, "body.model")
        found.models.add(request.model)
        first = first_lines.setdefault(request.digest, raw.number)
        if first != raw.number:
            raise BadLine("duplicate_custom_id", f"the custom_id is the same as in line {first:,}.", "custom_id")
        try:
            prefix = prefix_key(request.body, request.endpoint.prompt)
        except ValueError:
            raise BadLine("invalid_json", "body holds a number that is not finite.", "body") from None
        return Line(raw.number, raw.offset, len(raw.text), request.model, request.digest, prefix)

    def _read(self, raw: _Raw) -> Request:
        if len(raw.text) > MAX_REQUEST_BYTES:
            raise BadLine("line_too_long", f"the line is longer than {MAX_REQUEST_BYTES:,} bytes.")
        try:
            return read_line(raw.text, self._models)
        except BadLine as bad:
            if raw.has_line_break or bad.code not in ("invalid_json", "invalid_utf8"):
                raise
            message = f"the last line has no line break and is cut off: {bad.message}"
            raise BadLine("truncated_line", message) from None


def sorted_for_reuse(lines: list[Line]) -> list[Line]:
    """Return the lines with shared prompt prefixes next to each other."""
    return sorted(lines, key=lambda line: (line.prefix, line.number))


def prefix_key(body: dict[str, Any], prompt: Sequence[str]) -> bytes:
    """Return a key that sorts requests with a common prefix together. `prompt`: the fields of a body that the prompt is
    made of, in its order. Raises ValueError for non-finite numbers."""
    first = {name: body.get(name) for name in prompt}
    text = json.dumps({**first, **body}, separators=(",", ":"), allow_nan=False).encode()
    return b"".join(zlib.crc32(block).to_bytes(4) for block in _blocks(text))


def _blocks(text: bytes) -> Iterator[bytes]:
    start = 0
    # 74,752 characters in all: small blocks separate short instructions, large ones are enough for documents.
    for size in chain(repeat(64, 16), repeat(512, 16), repeat(4096, 16)):
        if start >= len(text):
            return
        yield text[start : start + size]
        start += size


WINDOW = 256  # lines; more than a worker has rows, so that its next jobs are already queued

DEFAULT_WINDOW = "24h"

UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def kept_path(output: Path) -> Path:
    """Return the path of the outcomes that are kept while their lines are run again: out.jsonl.retries."""
    return output.with_name(f"{output.name}.retries")


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of a run. Raises ValueError if two of them are the same."""

    input: Path
    output: Path
    errors: Path
    state: Path

    def __post_init__(self) -> None:
        if len({path.resolve() for path in (self.input, *self.results, self.state)}) < 5:
            raise ValueError("input, output and errors must be different files")

    @classmethod
    def next_to_output(cls, input: Path, output: Path, errors: Path | None = None) -> Self:
        """Return the paths of a run. The error file and the state file are next to the output if not given: for
        out.jsonl, out.errors.jsonl and out.jsonl.run. Raises ValueError if the output names no file."""
        if not output.name:
            raise ValueError(f"output: {output} is a folder; give the path of a file")
        failed = errors or output.with_name(f"{output.name.removesuffix('.jsonl')}.errors.jsonl")
        state = output.with_name(f"{output.name}.run")
        return cls(input.absolute(), output.absolute(), failed.absolute(), state.absolute())

    @property
    def results(self) -> tuple[Path, Path, Path]:
        """The files that have outcomes of lines."""
        return self.output, self.errors, kept_path(self.output)

    def refuse_to_overwrite(self) -> None:
        """Check that a new run overwrites nothing. Raises `BatchRefused` if a result file is not empty, is a broken
        link, or is not a regular file."""
        for path in self.results:
            if path.is_symlink() and not path.exists():
                raise BatchRefused(f"{path} is a broken link: give another path, or remove it")
            if path.exists() and (not path.is_file() or path.stat().st_size):
                raise BatchRefused(
                    f"{path} already exists, and is not a file of this run: give another path, or remove it"
                )


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run. None keeps the value of a resumed run, and is the default for a new one.

    Raises ValueError for a bad completion window, or a window below 1.
    """

    models: Mapping[str, str] | None = None  # served names by the names in the file; None: unchanged
    completion_window: str | None = None  # by default 24h
    metadata: Mapping[str, str] | None = None
    window: int = WINDOW  # lines of one model that are queued or running at once
    id: str = field(default_factory=new_run_id)  # used for a new run only
    served_only: bool = False  # refuse a file for a model without a worker, if other models have one
    models_from_setting: bool = False  # `models` is SLUICE_BATCH_MODELS, which is meant for many files
    retry: Mapping[str, int] | None = None  # how many times to run a line again, by the kind of its outcome
    tenant: str | None = None  # of the run's jobs
    not_before: float | None = None  # Unix seconds; for a run of a folder
    priority: int = 0  # likewise
    hours: OpenHours | None = None  # of the workers' offline jobs, for the estimate of the end

    def __post_init__(self) -> None:
        read_kinds(self.retry or ())
        most = 10  # by doubling, the limit of tokens is then a thousand times as high
        if any(not 1 <= times <= most for times in (self.retry or {}).values()):
            raise ValueError(f"retries: a line can be run again 1 to {most} times")
        parse_window(self.completion_window or DEFAULT_WINDOW)
        if self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}")
        if not -100 <= self.priority <= 100:
            raise ValueError(f"priority must be from -100 to 100, not {self.priority}")


def parse_window(window: str) -> int:
    """Return the seconds of a completion window such as 24h. Raises ValueError."""
    found = re.fullmatch(r"([1-9]\d{0,8})([smhd])", window, re.ASCII)
    if found is None:
        raise ValueError(f"completion_window: {window!r} is not a number with a unit s, m, h or d, such as 24h")
    return int(found[1]) * UNITS_S[found[2]]
