"""Makes requests of the rows of a table: a template with the names of columns in braces, images, parameters."""

import base64
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sluice.batch.tables import Kind, Row, as_text, shorten
from sluice.contract.keys import MAX_REQUEST_BYTES
from sluice.errors import BatchRefused

_MARK = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
# The first bytes of an image's file, by the type that workers accept it as.
_IMAGES = (
    (re.compile(rb"\x89PNG\r\n"), "png"),
    (re.compile(rb"\xff\xd8\xff"), "jpeg"),
    (re.compile(rb"GIF8[79]a"), "gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "webp"),
)
_OWN_FIELDS = ("messages", "model", "n", "stream", "stream_options", "on_disconnect")


class BadRow(Exception):
    """A row cannot become a request; the message says why."""


class Template:
    """A text with columns: `{name}` is replaced by the cell, and `{{` and `}}` are braces."""

    def __init__(self, text: str, columns: Sequence[str], name: str) -> None:
        """Raises `BatchRefused`, with the near names, if a column does not exist. `name`: of the text, for messages."""
        self.columns = set[str]()
        self._parts = list[tuple[str, str | None]]()  # a text, and the column behind it
        start = 0
        text = text.removesuffix("\n")
        before = ""
        for mark in _MARK.finditer(text):
            before += text[start : mark.start()]
            start = mark.end()
            if mark[0] in ("{{", "}}"):
                before += mark[0][0]
                continue
            line = text.count("\n", 0, mark.start()) + 1
            if mark[1] is None:
                raise BatchRefused(f"{name}, line {line:,}: a single {mark[0]}; write {mark[0] * 2} for a brace")
            check_column(mark[1], columns, f"{name}, line {line:,}")
            self.columns.add(mark[1])
            self._parts.append((before, mark[1]))
            before = ""
        self._parts.append((before + text[start:], None))

    def fill(self, cells: Mapping[str, Any]) -> str:
        """Return the text for a row; a cell that is missing or null is empty."""
        return "".join(text if name is None else text + as_text(cells.get(name)) for text, name in self._parts)


def check_column(name: str, columns: Sequence[str], where: str) -> None:
    """Raises `BatchRefused`, with the nearest names, if the table has no such column."""
    if name in columns:
        return
    lower = {each.lower(): each for each in columns}
    near = [lower[each] for each in get_close_matches(name.lower().strip(), lower, n=3)]
    named = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {_listed(columns)}."
    braces = "" if name.isidentifier() or near else " Braces that name no column are written {{ and }}."
    raise BatchRefused(f"{where}: the table has no column {shorten(name)!r}; {named}{braces}")


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(map(repr, list(names)[:12]))
    return f"{shown} and {len(names) - 12:,} more" if len(names) > 12 else shown


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of each row. All of it decides the requests, so a run is resumed with the same only."""

    prompt: str
    system: str | None = None
    schema: Mapping[str, Any] | None = None
    image: str | None = None  # the column
    params: Mapping[str, Any] | None = None  # of each request
    key: str | None = None  # the column; None: the row's number

    def fields(self) -> dict[str, Kind]:
        """Return the columns of an answer: the name of each field of the schema, and its kind."""
        if self.schema is None:
            return {"answer": "string"}
        return {name: _kind(field) for name, field in self.schema["properties"].items()}


class RowRequests:
    """Makes a line of a file of requests of each row."""

    def __init__(self, asked: Asked, columns: Sequence[str], image_folder: Path) -> None:
        """Raises `BatchRefused` for a template, parameter or column that does not fit the table."""
        self._asked, self._image_folder = asked, image_folder.resolve()
        self._prompt = Template(asked.prompt, columns, "the prompt")
        self._system = None if asked.system is None else Template(asked.system, columns, "the system prompt")
        for option, name in (("--image", asked.image), ("--key-column", asked.key)):
            if name is not None:
                check_column(name, columns, option)
        if not self._prompt.columns and asked.image is None and not (self._system and self._system.columns):
            raise BatchRefused(f"the prompt names no column, so each row would ask the same; it has {_listed(columns)}")
        self._params = _checked_params(asked)

    def key(self, row: Row) -> str:
        """Return what joins the row and its answer, the line's custom_id. Raises `BadRow`."""
        if self._asked.key is None:
            return str(row.number)
        key = as_text(row.cells.get(self._asked.key))
        if not 1 <= len(key) <= 512 or not _is_utf8(key):
            raise BadRow(f"the key must be 1 to 512 characters, not {shorten(key)!r}")
        return key

    def body(self, row: Row) -> dict[str, Any]:
        """Return the request. Reads the row's image. Raises `BadRow`."""
        if row.problem is not None:
            raise BadRow(row.problem)
        text = self._prompt.fill(row.cells)
        content: Any = text
        if self._asked.image is not None:
            image = {"type": "image_url", "image_url": {"url": self._image(row.cells.get(self._asked.image))}}
            content = [image, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.fill(row.cells)})
        return {"messages": messages, **self._params}

    def line(self, row: Row) -> bytes:
        """Return the line of the row, with its line break. Raises `BadRow`."""
        line = {"custom_id": self.key(row), "method": "POST", "url": "/v1/chat/completions", "body": self.body(row)}
        try:
            raw = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        except UnicodeEncodeError:
            raise BadRow("a cell of the prompt holds half of a surrogate pair, which is no character") from None
        if len(raw) > MAX_REQUEST_BYTES:
            raise BadRow(f"its request has {len(raw):,} bytes; the limit is {MAX_REQUEST_BYTES:,}")
        return raw

    def _image(self, cell: object) -> str:
        """Return the URL of an image: as it is, or with the bytes of the cell or of a file below the folder."""
        match cell:
            case bytes(data) | {"bytes": bytes(data)}:  # in Parquet; the second is that of Hugging Face's datasets
                return _data_url(data, "the image")
        named = as_text(cell)
        if re.match(r"(https?|data):", named, re.IGNORECASE):
            return named
        if not named:
            raise BadRow("the cell of the image is empty")
        try:
            path = (self._image_folder / named).resolve()
            if not path.is_relative_to(self._image_folder):
                raise BadRow(
                    f"image {shorten(named)}: it is outside of {self._image_folder}; name its folder with --image-dir"
                )
            return _data_url(_read_file(path), f"image {shorten(named)}")
        except (OSError, ValueError, RuntimeError) as error:  # no such file, a null character, a loop of links
            reason = getattr(error, "strerror", None) or error
            raise BadRow(f"image {shorten(named)}: {reason}") from None


_MOST_BYTES = MAX_REQUEST_BYTES * 3 // 4  # of an image, which in base64 must fit into a request


def _read_file(path: Path) -> bytes:
    """Return the content, or one byte more than an image may have. Raises OSError or ValueError."""
    if not path.is_file():
        raise ValueError("it is no regular file" if path.exists() else "there is no such file")
    with path.open("rb") as file:
        return file.read(_MOST_BYTES + 1)


def _data_url(data: bytes, name: str) -> str:
    if len(data) > _MOST_BYTES:
        raise BadRow(f"{name}: it is larger than {_MOST_BYTES:,} bytes, which a request can hold")
    for first, kind in _IMAGES:
        if first.match(data):
            return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    raise BadRow(f"{name}: it is no PNG, JPEG, GIF or WebP")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_params(asked: Asked) -> dict[str, Any]:
    params = dict(asked.params or {})
    if own := [name for name in _OWN_FIELDS if name in params]:
        remedy = "use --model" if own[0] == "model" else "leave it out"
        raise BatchRefused(f"--param {own[0]}: a table's run sets it; {remedy}")
    if asked.schema is None:
        return params
    if "response_format" in params:
        raise BatchRefused("--param response_format: --schema sets it; leave one of them out")
    schema = {"name": "answer", "strict": True, "schema": asked.schema}
    return {**params, "response_format": {"type": "json_schema", "json_schema": schema}}


def parse_schema(text: str, name: str) -> dict[str, Any]:
    """Return the JSON Schema in a text; of a whole `response_format` its schema. It allows no fields but its own, which
    are the columns, unless it says otherwise itself. Raises `BatchRefused`."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BatchRefused(f"{name} is not JSON: {error}") from None
    match schema:
        case {"type": "json_schema", "json_schema": {"schema": dict(inner)}}:
            schema = inner
    match schema:
        case {"properties": dict(properties)} if properties:
            says_itself = schema.keys() & {
                "additionalProperties",
                "patternProperties",
                "allOf",
                "anyOf",
                "oneOf",
                "$ref",
            }
            return dict(schema) if says_itself else {**schema, "additionalProperties": False}
    raise BatchRefused(
        f"{name}: its fields become columns, so it must be the schema of an object with properties, such as "
        '{"type": "object", "properties": {"label": {"enum": ["good", "bad"]}}, "required": ["label"]}'
    )


_KINDS: Mapping[str, Kind] = {"string": "string", "integer": "integer", "number": "number", "boolean": "boolean"}


def _kind(field: object) -> Kind:
    """Return the kind of a field: that of its types or values but null, if they have one, else JSON."""
    match field:
        case {"enum": list(values)}:
            kinds = {_kind_of_constant(value) for value in values if value is not None}
        case {"const": value}:
            kinds = {_kind_of_constant(value)}
        case {"anyOf": list(choices)} | {"oneOf": list(choices)}:
            kinds = {_kind(choice) for choice in choices if choice != {"type": "null"}}
        case {"type": list(types)}:
            kinds = {_KINDS.get(str(each), "json") for each in types if each != "null"}
        case {"type": str(single)}:
            kinds = {_KINDS.get(single, "json")}
        case _:
            return "json"
    return kinds.pop() if len(kinds) == 1 else "json"


def _kind_of_constant(value: object) -> Kind:
    match value:
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
    return "json"


def parse_answer(content: str, fields: Collection[str]) -> dict[str, Any]:
    """Return the fields of a JSON answer. Raises ValueError if it is no object with some of them."""
    try:
        answer = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(answer, dict):
        raise ValueError("it is no JSON object")
    return {name: answer[name] for name in fields if name in answer}
