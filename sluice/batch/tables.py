"""Reads and writes tables row by row: CSV, TSV, JSON lines and Parquet. No table is whole in memory."""

import codecs
import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, Protocol, TextIO

from sluice.contract.keys import MAX_REQUEST_BYTES
from sluice.errors import BatchRefused
from sluice.wording import counted, json_problem

Kind = Literal["string", "integer", "number", "boolean", "json"]  # of a column; `json`: anything, as JSON text
SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
_NO_PYARROW = "pyarrow reads and writes Parquet, and is not installed here: pip install 'mlx-sluice[tables]'"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table. `number`: from 1, without the header."""

    number: int
    cells: Mapping[str, Any]
    problem: str | None = None  # the row cannot be used; its cells are those that could be read
    original: Any = None  # the row as a record batch of pyarrow, if it comes from Parquet


class Table(Protocol):
    """An open table. `columns` are its names in order, `kinds` their kinds; Parquet keeps its own types."""

    columns: Sequence[str]
    kinds: Mapping[str, Kind]

    def rows(self) -> Iterator[Row]:
        """Read the file from its start. Raises `BatchRefused` if it cannot be read to its end."""


def open_table(path: Path, encoding: str | None = None, delimiter: str | None = None) -> Table:
    """Open a table by its suffix. `encoding` and `delimiter` are for CSV and TSV. Raises `BatchRefused`."""
    if path.exists() and not path.is_file():
        raise BatchRefused(f"{path} is not a regular file: a table is read more than once")
    suffix = table_suffix(path)
    if suffix in (".csv", ".tsv"):
        return _check_names(path, _DelimitedTable(path, encoding, delimiter))
    if encoding or delimiter:
        raise BatchRefused(f"--encoding and --delimiter are for CSV and TSV, and {path.name} is neither")
    return _check_names(path, _JsonTable(path) if suffix == ".jsonl" else _ParquetTable(path))


def table_suffix(path: Path) -> str:
    """Return the suffix of a table. Raises `BatchRefused` for any other file."""
    if (suffix := path.suffix.lower()) not in SUFFIXES:
        raise BatchRefused(f"{path}: the name of a table ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    return suffix


def _check_names(path: Path, table: Table) -> Table:
    places = dict[str, list[int]]()
    for place, name in enumerate(table.columns, 1):
        places.setdefault(name, []).append(place)
    twice = [f"{name!r} (columns {' and '.join(map(str, found))})" for name, found in places.items() if len(found) > 1]
    if twice:
        raise BatchRefused(f"{path}: names of columns occur twice: {', '.join(twice[:20])}. Rename them in the header")
    return table


class _DelimitedTable:
    """CSV or TSV. All cells are text."""

    def __init__(self, path: Path, encoding: str | None, delimiter: str | None) -> None:
        csv.field_size_limit(MAX_REQUEST_BYTES)  # for the whole process; a larger cell would not be accepted anyway
        self._path, self._encoding = path, encoding
        self.delimiter = delimiter or ("\t" if path.suffix.lower() == ".tsv" else self._found_delimiter())
        header = next(self._records(self.delimiter), None)
        if header is None:
            raise BatchRefused(f"{path} is empty: its first line must name the columns")
        self.columns: Sequence[str] = header
        self.kinds: Mapping[str, Kind] = dict.fromkeys(header, "string")

    def rows(self) -> Iterator[Row]:
        for number, cells in enumerate(islice(self._records(self.delimiter), 1, None), 1):
            named = dict(zip(self.columns, cells, strict=False))
            yield Row(number, {name: named.get(name, "") for name in self.columns}, self._problem(cells))

    def _problem(self, cells: list[str]) -> str | None:
        if len(cells) == len(self.columns):
            return None
        more = shorten(f"; beyond it: {cells[len(self.columns) :]!r}") if len(cells) > len(self.columns) else ""
        cause = "a cell that holds the delimiter or a line break must stand in quotes"
        return f"{counted(len(cells), 'cell')}, and the header has {len(self.columns):,}{more}; {cause}"

    def _found_delimiter(self) -> str:
        """Return the comma, unless only another delimiter divides the first records into equally many cells."""
        fitting = [each for each in (",", ";", "\t", "|") if self._divides(each)]
        return fitting[0] if fitting and (fitting[0] == "," or len(fitting) == 1) else ","

    def _divides(self, delimiter: str) -> bool:
        try:
            sizes = {len(cells) for cells in islice(self._records(delimiter), 20)}
        except _BadSyntax:
            return False
        return len(sizes) == 1 and sizes != {1}

    def _records(self, delimiter: str) -> Iterator[list[str]]:
        """Yield the cells of each line that is not empty."""
        reader = None
        try:
            is_utf8 = codecs.lookup(self._encoding or "utf-8").name == "utf-8"
            # utf-8-sig drops a byte order mark.
            with self._path.open(encoding="utf-8-sig" if is_utf8 else self._encoding, newline="") as file:
                reader = csv.reader(file, delimiter=delimiter, strict=True)
                yield from filter(None, reader)
        except csv.Error as error:
            raise _BadSyntax(
                f"{self._path}, line {reader.line_num if reader else 1:,}: {_csv_problem(error)}; a quote within a "
                'quoted cell is written twice ("")'
            ) from None
        except UnicodeError as error:
            raise BatchRefused(self._wrong_encoding(error, reader.line_num if reader else 0)) from None
        except LookupError:
            raise BatchRefused(
                f"--encoding: {self._encoding!r} is no encoding of text; try latin-1 or utf-16"
            ) from None
        except OSError as error:
            raise _cannot_read(self._path, error) from None

    def _wrong_encoding(self, error: UnicodeError, line: int) -> str:
        if self._encoding:
            return f"{self._path} is not in {self._encoding}, after line {line:,}: {error}. Give another --encoding"
        with self._path.open("rb") as file:
            guess = "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "latin-1"
        byte = f": byte 0x{error.object[error.start]:02x}" if isinstance(error, UnicodeDecodeError) else ""
        return f"{self._path} is not UTF-8, after line {line:,}{byte}. Give its encoding, such as --encoding {guess}"


class _BadSyntax(BatchRefused):
    """A file is not CSV."""


def _csv_problem(error: csv.Error) -> str:
    if "field limit" in str(error):
        return f"a cell is longer than {MAX_REQUEST_BYTES:,} characters, or a quote before it is not closed"
    if "unexpected end" in str(error):
        return "the file ends within a quoted cell"
    return str(error)


class _JsonTable:
    """JSON lines: each an object, whose names are the columns in the order in which they first occur."""

    def __init__(self, path: Path) -> None:
        self._path = path
        kinds = dict[str, Kind | None]()
        for row in self.rows():
            for name, value in row.cells.items():
                kinds[name] = _common(kinds.get(name), _kind_of(value))
        if not kinds:
            raise BatchRefused(f"{path} has no line that is a JSON object with names")
        self.columns: Sequence[str] = list(kinds)
        self.kinds: Mapping[str, Kind] = {name: kind or "string" for name, kind in kinds.items()}

    def rows(self) -> Iterator[Row]:
        try:
            with self._path.open("rb") as file:
                lines = filter(bytes.strip, self._lines(file))
                for number, raw in enumerate(lines, 1):
                    yield _json_row(number, raw)
        except OSError as error:
            raise _cannot_read(self._path, error) from None

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        number = 0
        while raw := file.readline(MAX_REQUEST_BYTES + 1):
            number += 1
            if len(raw) > MAX_REQUEST_BYTES:
                raise BatchRefused(f"{self._path}, line {number:,}: it is longer than {MAX_REQUEST_BYTES:,} bytes")
            yield raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw


def _json_row(number: int, raw: bytes) -> Row:
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return Row(number, {}, f"not UTF-8: {error.reason} at byte {error.start + 1:,}")
    except (ValueError, RecursionError) as error:
        return Row(number, {}, f"not JSON: {json_problem(error)}")
    return Row(number, value) if isinstance(value, dict) else Row(number, {}, f"not a JSON object: {shorten(value)}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


class _ParquetTable:
    """A Parquet file. Cells are Python's values; times of nanoseconds, which Python lacks, are text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.schema = self._open().schema_arrow
        self.columns: Sequence[str] = self.schema.names
        self.kinds: Mapping[str, Kind] = {}

    def rows(self) -> Iterator[Row]:
        number = 0
        arrow = _pyarrow()
        try:
            for batch in self._open().iter_batches(batch_size=64):  # rows, of which each may hold a megabyte
                columns = [_values(column) for column in batch.columns]
                for index, cells in enumerate(zip(*columns, strict=True)):
                    number += 1
                    yield Row(number, dict(zip(self.columns, cells, strict=True)), None, batch.slice(index, 1))
        except (arrow.ArrowException, ValueError, OSError) as error:
            raise BatchRefused(f"{self._path}, after row {number:,}: {error}") from None

    def _open(self) -> Any:
        arrow = _pyarrow()
        from pyarrow.parquet import ParquetFile

        try:
            return ParquetFile(self._path)
        except arrow.ArrowException as error:
            raise BatchRefused(f"{self._path} is not a Parquet file: {error}") from None
        except OSError as error:
            raise _cannot_read(self._path, error) from None


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise BatchRefused(_NO_PYARROW) from None
    return pyarrow


def _values(column: Any) -> list[Any]:
    arrow = _pyarrow()
    if getattr(column.type, "unit", None) == "ns":
        column = column.cast(arrow.string())
    values: list[Any] = column.to_pylist()
    return values


def _cannot_read(path: Path, error: OSError) -> BatchRefused:
    return BatchRefused(f"cannot read {path}: {error.strerror or error}")


def shorten(value: object) -> str:
    """Return a value as text of at most 200 characters, to quote it in a message."""
    text = as_text(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def as_text(value: object) -> str:
    """Return a cell as text: dates in ISO 8601, what is nested as JSON, nothing for null."""
    match value:
        case None:
            return ""
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case date() | time():
            return value.isoformat()
        case bytes():
            return value.hex()
        case dict() | list() | tuple():
            return _dumps(value)
    return str(value)


def _dumps(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=as_text, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, default=as_text)


def _finite(value: object) -> object:
    """Return the value with null for numbers that JSON lacks."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {name: _finite(each) for name, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


def _kind_of(value: object) -> Kind | None:
    match value:
        case None:
            return None
        case bool():
            return "boolean"
        case int() if fits_64_bits(value):
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
    return "json"


def fits_64_bits(value: int) -> bool:
    """True for an integer that Parquet can hold."""
    return -(2**63) <= value < 2**63


def _common(one: Kind | None, other: Kind | None) -> Kind | None:
    if one is None or other is None or one == other:
        return one or other
    return "number" if {one, other} == {"integer", "number"} else "json"


Written = tuple[Row, Mapping[str, Any]]  # a row, and the cells of its new columns


def write_table(path: Path, suffix: str, source: Table, added: Mapping[str, Kind], rows: Iterable[Written]) -> None:
    """Write rows of `source` with new columns behind its own. `suffix`: the format. Raises OSError, or what `rows`
    raises; the file is then incomplete."""
    if suffix == ".parquet":
        _write_parquet(path, source, added, rows)
        return
    names = [*source.columns, *added]
    # No character ends the run: half of a surrogate pair becomes \ud800.
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        write = _json_writer(file, added) if suffix == ".jsonl" else _cell_writer(file, suffix, names)
        for row, cells in rows:
            write(row.cells, cells)


_Write = Callable[[Mapping[str, Any], Mapping[str, Any]], object]


def _json_writer(file: TextIO, added: Mapping[str, Kind]) -> _Write:
    return lambda cells, new: file.write(_dumps({**cells, **{name: new.get(name) for name in added}}) + "\n")


def _cell_writer(file: TextIO, suffix: str, names: Sequence[str]) -> _Write:
    writer = csv.writer(_UnixLines(file), delimiter="\t" if suffix == ".tsv" else ",")
    writer.writerow(names)

    def write(cells: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        both = {**cells, **new}
        writer.writerow([as_text(both.get(name)) for name in names])

    return write


class _UnixLines:
    """Ends the lines of a csv.writer with LF. With LF as its `lineterminator` it would not quote a cell with CR."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> object:
        return self._file.write(f"{line.removesuffix(chr(13) + chr(10))}\n")


def _write_parquet(path: Path, source: Table, added: Mapping[str, Kind], rows: Iterable[Written]) -> None:
    arrow = _pyarrow()
    from pyarrow.parquet import ParquetWriter

    types = {
        "string": arrow.string(),
        "integer": arrow.int64(),
        "number": arrow.float64(),
        "boolean": arrow.bool_(),
        "json": arrow.string(),
    }
    kept = source.schema if isinstance(source, _ParquetTable) else None
    own = kept or arrow.schema([(name, types[source.kinds[name]]) for name in source.columns])
    schema = own
    for name, kind in added.items():
        schema = schema.append(arrow.field(name, types[kind]))
    with ParquetWriter(path, schema) as writer:
        for group in _groups(rows):
            if kept:
                table = arrow.Table.from_batches([row.original for row, _ in group], own)
            else:
                cells = [[_typed(row.cells.get(name), source.kinds[name]) for row, _ in group] for name in own.names]
                table = arrow.Table.from_arrays(list(map(arrow.array, cells, own.types)), schema=own)
            for name, kind in added.items():
                values = arrow.array([_typed(new.get(name), kind) for _, new in group], types[kind])
                table = table.append_column(schema.field(name), values)
            writer.write_table(table)


def _groups(rows: Iterable[Written]) -> Iterator[list[Written]]:
    """Divide rows into row groups: at most 10,000 rows, or about 8 MB."""
    group, size = list[Written](), 0
    for row, new in rows:
        group.append((row, new))
        original = 0 if row.original is None else row.original.nbytes
        size += original + sum(len(each) for each in (*row.cells.values(), *new.values()) if isinstance(each, str))
        if len(group) == 10_000 or size >= 8_000_000:
            yield group
            group, size = [], 0
    if group:
        yield group


def _typed(value: object, kind: Kind) -> object:
    """Return a value as pyarrow takes it for a column of this kind."""
    if value is None:
        return None
    match kind:
        case "string" | "json":
            return as_text(value).encode("utf-8", "backslashreplace").decode()
        case "number" if isinstance(value, int | float):
            return float(value)
        case "integer" if isinstance(value, float):
            return int(value)  # 3.0, which JSON Schema counts as an integer
    return value
