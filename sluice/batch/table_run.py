"""A run of a table: makes the file of requests that `run_batch` runs, and joins the answers to the rows.

All of its files are in a folder next to the output: `out.csv.run`. What the requests were made of is in `table.json`,
so that another process can resume the run or write the table again.
"""

import fcntl
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from sluice.batch.files import StateFile
from sluice.batch.lines import custom_id_digest
from sluice.batch.prompts import Asked, BadRow, RowRequests, parse_answer
from sluice.batch.source import MAX_FILE_BYTES, MAX_LINES, RunPaths
from sluice.batch.tables import Kind, Row, Table, Written, fits_64_bits, open_table, shorten, table_suffix, write_table
from sluice.errors import BatchRefused, BatchTaken
from sluice.wording import counted

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chosen:
    """What decides the requests of a run: the table's file and rows, and what is asked. Resumed with the same only."""

    asked: Asked
    model: str | None = None
    encoding: str | None = None
    delimiter: str | None = None
    rows: tuple[int, int | None] = (1, None)  # the first, and the last if not that of the table
    sample: int | None = None  # run this many of them, drawn with `seed`
    seed: int = 0
    image_folder: str | None = None  # by default the table's

    def described(self, sha256: str) -> dict[str, Any]:
        """Return it as JSON, by the words of `_NAMES`."""
        values = asdict(self)
        return {"sha256": sha256, **values.pop("asked"), **values, "rows": list(self.rows)}

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Self:
        """Return what `described` stands for."""
        asked = {name: described[name] for name in Asked.__dataclass_fields__}
        own = {name: described[name] for name in cls.__dataclass_fields__ if name != "asked"}
        return cls(**{**own, "asked": Asked(**asked), "rows": tuple(described["rows"])})


_NAMES = {
    "sha256": "table",
    "schema": "schema",
    "system": "system prompt",
    "params": "--param",
    "image_folder": "--image-dir",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """What the output has beside the input's columns. May change when a run is repeated."""

    prefix: str = ""  # of the names of new columns
    details: bool = False  # with the finish reason and the tokens

    def columns(self, asked: Asked) -> dict[str, Kind]:
        """Return the kinds of the new columns by name. Raises `BatchRefused` if two have the same."""
        own: dict[str, Kind] = {"error": "string"}
        if self.details:
            own |= {"finish_reason": "string", "prompt_tokens": "integer", "completion_tokens": "integer"}
        fields = asked.fields()
        if both := own.keys() & fields.keys():
            raise BatchRefused(f"the schema's field {min(both)!r} has the name of another new column: rename it")
        return self.named({**fields, **own})

    def named(self, cells: Mapping[str, T]) -> dict[str, T]:
        """Return what is given by names without the prefix by the names of the columns."""
        return {f"{self.prefix}{name}": value for name, value in cells.items()}


@dataclass(slots=True)
class TableCounts:
    """Numbers of rows of a written table."""

    rows: int = 0
    errors: int = 0


@dataclass(slots=True)
class Built:
    """The requests of a table: their number and size, and the rows that cannot be asked, with the reason."""

    lines: int = 0
    size: int = 0  # in bytes
    bad_rows: dict[int, str] = field(default_factory=dict)
    first_rows: dict[bytes, int] = field(default_factory=dict)  # by the digest of the key
    key_problems: list[str] = field(default_factory=list)

    def add(self, row: Row, requests: RowRequests) -> bytes | None:
        """Return the row's line; None if there is none. Raises `BatchRefused` if it exceeds the limits of a run."""
        if row.problem is not None:
            self.bad_rows[row.number] = row.problem
            return None
        try:
            self._check_key(row, requests.key(row))
        except BadRow as problem:
            self.key_problems.append(f"row {row.number:,}: {problem}")
            return None
        try:
            line = requests.line(row)
        except BadRow as problem:
            self.bad_rows[row.number] = str(problem)
            return None
        self.lines += 1
        self.size += len(line)
        return line

    def _check_key(self, row: Row, key: str) -> None:
        first = self.first_rows.setdefault(custom_id_digest(key), row.number)
        if first != row.number:
            raise BadRow(f"its key {shorten(key)!r} is that of row {first:,}")

    @property
    def is_too_large(self) -> bool:
        """True if there is more than a run accepts."""
        return self.lines + len(self.bad_rows) > MAX_LINES or self.size > MAX_FILE_BYTES

    def refuse_bad_keys(self, key: str | None) -> None:
        """Raises `BatchRefused` that names the rows whose keys are missing or occur twice."""
        if problems := self.key_problems:
            more = f"; and {len(problems) - 20:,} more" if len(problems) > 20 else ""
            raise BatchRefused(f"--key-column {key}: a key names one row. {'; '.join(problems[:20])}{more}")


class TableRun:
    """The run of a table with one output."""

    def __init__(self, path: Path, output: Path, chosen: Chosen, shown: Shown) -> None:
        """Open the table. Raises `BatchRefused` if it cannot be read, or does not fit what is asked."""
        self._path, self.output = path.absolute(), output.absolute()
        self._chosen, self._shown = chosen, shown
        table_suffix(self.output)
        self._refuse_own_table(self.output)
        self.table: Table = open_table(self._path, chosen.encoding, chosen.delimiter)
        image_folder = Path(chosen.image_folder) if chosen.image_folder else self._path.parent
        self.requests_of = RowRequests(chosen.asked, self.table.columns, image_folder)
        self.added = shown.columns(chosen.asked)
        if taken := [name for name in self.added if name in self.table.columns]:
            raise BatchRefused(
                f"the table has a column {taken[0]!r} already: begin the new ones otherwise, such as with --prefix new_"
            )
        self._folder = self.output.with_name(f"{self.output.name}.run")
        self._lock: BinaryIO | None = None
        self.requests = self._folder / f"{self.output.stem}.jsonl"
        self.answers = self._folder / f"{self.output.stem}.answers.jsonl"
        self._paths = RunPaths.next_to_output(self.requests, self.answers)
        self._made_of = self._folder / "table.json"
        self.bad_rows: dict[int, str] = {}

    @classmethod
    def of_answers(cls, answers: Path) -> Self | None:
        """Return the run of a table that an output of `run_batch` belongs to; None if it is of a file of requests.
        Raises `BatchRefused` if the table cannot be read, or has changed."""
        if answers.parent.suffix != ".run":
            return None  # a table.json there is the user's
        try:
            saved = json.loads((answers.parent / "table.json").read_text("utf-8"))
        except OSError:
            return None
        output = answers.parent.with_name(answers.parent.name.removesuffix(".run"))
        run = cls(Path(saved["path"]), output, Chosen.of(saved["chosen"]), Shown(**saved["shown"]))
        run._use(saved)
        return run

    def _refuse_own_table(self, output: Path) -> None:
        if self._path.resolve() == output.resolve():
            raise BatchRefused(f"{output} is the table itself, and would be overwritten: name another output")

    def rows(self) -> Iterator[Row]:
        """Yield the chosen rows."""
        first, last = self._chosen.rows
        for row in islice(self.table.rows(), first - 1, last):
            if self._sampled is None or row.number in self._sampled:
                yield row

    @cached_property
    def _sampled(self) -> frozenset[int] | None:
        if self._chosen.sample is None:
            return None
        first, last = self._chosen.rows
        numbers = range(first, first + sum(1 for _ in islice(self.table.rows(), first - 1, last)))
        size = min(self._chosen.sample, len(numbers))
        return frozenset(random.Random(self._chosen.seed).sample(numbers, size))

    def prepare(self) -> None:
        """Make the file of requests, or check that it is the one of an earlier call. This process then has the run's
        folder until it ends. Raises `BatchRefused`, `BatchTaken` if another process has it, or OSError."""
        is_new = not self._folder.exists()
        if self._folder.is_file():
            raise BatchRefused(f"{self._folder} is the state of a run of another kind: name another output")
        if is_new and (self.output.is_symlink() or self.output.exists()) and not _is_empty(self.output):
            raise BatchRefused(f"{self.output} already exists, and is no file of this run: name another, or remove it")
        self._folder.mkdir(exist_ok=True)
        try:
            self._take()
            self._build_or_reuse()
        except BatchTaken:
            raise
        except BatchRefused:
            if is_new:
                self.discard()
            raise

    def discard(self) -> None:
        """Delete the folder of a run that queued nothing."""
        if not self._has_results:
            shutil.rmtree(self._folder)

    @property
    def _has_results(self) -> bool:
        return any(path.exists() and path.stat().st_size for path in self._paths.results)

    def _forget_failures(self) -> None:
        """Delete the files of a run that has ended without an answer, as with a parameter that each request is refused
        for: nobody needs them."""
        if self.answers.exists() and self.answers.stat().st_size:
            return
        with StateFile(self._paths.state) as state:
            saved = state.load()
        if saved is not None and saved.batch.ended:
            for path in self._folder.iterdir():
                if path.name != "lock":
                    path.unlink()

    def _take(self) -> None:
        self._lock = (self._folder / "lock").open("ab")  # kept open until the process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchTaken(f"another process runs this table: {self._folder} is locked") from None

    def _build_or_reuse(self) -> None:
        chosen = self._chosen.described(_sha256(self._path))
        saved = self._saved()
        if saved is not None and saved["chosen"] == chosen:
            self._use(saved)
            self._save(chosen)
            return
        if self._has_results:
            self._forget_failures()
        if self._has_results:
            raise BatchRefused(self._refusal(saved, chosen))
        built = self._build()
        self.bad_rows = built.bad_rows
        self._save(chosen)

    def _saved(self) -> dict[str, Any] | None:
        try:
            saved: dict[str, Any] = json.loads(self._made_of.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return saved

    def _use(self, saved: Mapping[str, Any]) -> None:
        self.bad_rows = {int(number): problem for number, problem in saved["bad_rows"].items()}
        self._sha256 = saved["chosen"]["sha256"]

    def _save(self, chosen: Mapping[str, Any]) -> None:
        made_of = {
            "path": str(self._path),
            "chosen": chosen,
            "shown": asdict(self._shown),
            "bad_rows": self.bad_rows,
        }
        self._sha256 = chosen["sha256"]
        part = self._made_of.with_suffix(".part")
        part.write_text(json.dumps(made_of), encoding="utf-8")
        part.replace(self._made_of)

    def _refusal(self, saved: Mapping[str, Any] | None, chosen: Mapping[str, Any]) -> str:
        earlier = saved["chosen"] if saved else {}
        names = [name for name in chosen if chosen[name] != earlier.get(name)]
        different = " and ".join(_NAMES.get(name, name) for name in names)
        return (
            f"{self.output} is the output of a run that was started with another {different}: use the same to resume "
            f"it, or name another output, or remove it and {self._folder}"
        )

    def _build(self) -> Built:
        part, built = self.requests.with_suffix(".part"), Built()
        last = self._chosen.rows[0] - 1  # row that fits
        with part.open("wb") as file:
            for row in self.rows():
                line = built.add(row, self.requests_of)
                if built.is_too_large:
                    raise BatchRefused(self._too_large(last))
                if line:
                    file.write(line)
                last = row.number
            file.flush()
            os.fsync(file.fileno())
        self.refuse(built)
        part.replace(self.requests)
        return built

    def refuse(self, built: Built) -> None:
        """Raises `BatchRefused` if rows cannot be told apart, or no row can be asked."""
        built.refuse_bad_keys(self._chosen.asked.key)
        if not built.lines:
            raise BatchRefused(self._nothing_to_ask(built))

    def key_of(self, row: Row) -> str:
        """Return the row's key; its number if the row is bad."""
        return str(row.number) if row.number in self.bad_rows else self.requests_of.key(row)

    def _too_large(self, last: int) -> str:
        limits = f"a run has at most {MAX_LINES:,} rows, and {MAX_FILE_BYTES:,} bytes of requests"
        if self._chosen.sample is not None:
            return f"{limits}: give a smaller --sample"
        first = self._chosen.rows[0]
        there = self.output
        names = [there.with_name(f"{there.stem}-{part}{there.suffix}").name for part in (1, 2)]
        parts = f"--rows {first}-{last} -o {names[0]}, and then --rows {last + 1}- -o {names[1]}"
        return f"{limits}. Run the table in parts: {parts}"

    def _nothing_to_ask(self, built: Built) -> str:
        if not built.bad_rows:
            return f"{self._path} has no row to run"
        listed = "; ".join(f"row {number:,}: {problem}" for number, problem in islice(built.bad_rows.items(), 20))
        return f"{self._path}: none of its {counted(len(built.bad_rows), 'row')} can be run. {listed}"

    def write_to(self, output: Path) -> TableCounts:
        """Write the table with the answers so far, whole or not at all. Raises `BatchRefused` if the input has changed
        or is this file, or OSError."""
        self._refuse_own_table(output)
        if _sha256(self._path) != self._sha256:
            raise BatchRefused(
                f"{self._path} was changed since the run began. The answers are in {self.answers}: restore the table "
                "and run the same command again"
            )
        part, counts = output.with_name(f"{output.name}.part"), TableCounts()
        try:
            with _Outcomes(self.answers, self._paths.errors) as outcomes:
                rows = ((row, self._shown.named(cells)) for row, cells in self._joined(outcomes, counts))
                write_table(part, table_suffix(output), self.table, self.added, rows)
            part.replace(output)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
        return counts

    def joined(self) -> Iterator[Written]:
        """Yield the chosen rows with the cells of their new columns, by their names without the prefix."""
        with _Outcomes(self.answers, self._paths.errors) as outcomes:
            yield from self._joined(outcomes, TableCounts())

    def _joined(self, outcomes: "_Outcomes", counts: TableCounts) -> Iterator[Written]:
        for row in self.rows():
            problem = self.bad_rows.get(row.number)
            line = None if problem else outcomes.find(self.requests_of.key(row))
            cells = self._cells(line, problem or "no answer yet: the run has not ended")
            counts.rows += 1
            counts.errors += cells["error"] is not None
            yield row, cells

    def _cells(self, line: Mapping[str, Any] | None, missing: str) -> dict[str, Any]:
        if line is None:
            return {"error": missing}
        body = (line.get("response") or {}).get("body") or {}
        choice = (body.get("choices") or [{}])[0]
        usage = body.get("usage") or {}
        details = {
            "finish_reason": choice.get("finish_reason"),
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
        }
        # A line of OpenAI's that failed with an HTTP status has its error in the body alone.
        if error := line.get("error") or body.get("error"):
            kind = error.get("code") or error.get("type") or "failed"
            answer: dict[str, Any] = {"error": f"{kind}: {error.get('message')}"}
        else:
            answer = self._answer((choice.get("message") or {}).get("content") or "")
        return {**answer, **(details if self._shown.details else {})}

    def _answer(self, content: str) -> dict[str, Any]:
        if self._chosen.asked.schema is None:
            return {"answer": content, "error": None}
        kinds = self._chosen.asked.fields()
        try:
            fields = parse_answer(content, kinds)
        except ValueError as problem:
            return {"error": f"answer_not_json: {problem}; the answer is {shorten(content)}"}
        large = [name for name, value in fields.items() if kinds[name] == "integer" and not _is_storable(value)]
        problems = [f"{name}: {shorten(fields.pop(name))} has more than 64 bits" for name in large]
        return {**fields, "error": "; ".join(problems) or None}


def _is_storable(value: object) -> bool:
    return not isinstance(value, int | float) or fits_64_bits(int(value))


def _is_empty(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 0


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BatchRefused(f"cannot read {path}: {error.strerror}") from None


class _Outcomes:
    """Finds the last line of each custom_id in the files of a run; an answer replaces a failure."""

    def __init__(self, answers: Path, errors: Path) -> None:
        self._files = [path.open("rb") for path in (errors, answers) if path.exists()]
        self._places = dict[bytes, tuple[BinaryIO, int]]()
        for file in self._files:
            offset = 0
            for raw in file:
                if raw.endswith(b"\n"):  # a process that was killed may leave a part of a line
                    self._places[custom_id_digest(json.loads(raw)["custom_id"])] = file, offset
                offset += len(raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def find(self, custom_id: str) -> dict[str, Any] | None:
        """Return the line; None if there is none yet."""
        if (place := self._places.get(custom_id_digest(custom_id))) is None:
            return None
        file, offset = place
        file.seek(offset)
        line: dict[str, Any] = json.loads(file.readline())
        return line
