"""Parses and checks the lines of an input file. docs/batches.md lists the rules."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from sluice.batch.endpoints import CHAT, ENDPOINTS, Endpoint
from sluice.contract import keys
from sluice.presence import mapped_name
from sluice.wording import json_problem

Models = Mapping[str, str]  # from the model names in a file to served names, as `mapped_name` reads them

_METHOD = "POST"
_FIELDS = ("custom_id", "method", "url", "body")
_EXAMPLE = (
    f'A line looks like {{"custom_id": "a", "method": "POST", "url": "{CHAT.url}", "body": {{"messages": [...]}}}}.'
)


class BadLine(Exception):
    """A line cannot be run: the code of the rule, a message, and the field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code, message, param)
        self.code = code
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Request:
    """A valid line of the input."""

    custom_id: str
    model: str  # the served name
    body: dict[str, Any]
    endpoint: Endpoint = CHAT
    named_model: str | None = None  # the name in the line

    @property
    def digest(self) -> bytes:
        """Digest of the custom_id."""
        return custom_id_digest(self.custom_id)

    def as_job(self) -> dict[str, Any]:
        """Return the body to queue. `on_disconnect` is `continue`, since an offline job has no subscribers. Raises
        `ApiError`, as the endpoint refuses the body over HTTP."""
        return {**self.endpoint.as_job(self.body), "model": self.model, "on_disconnect": "continue"}


def custom_id_digest(custom_id: str) -> bytes:
    """Return a 16-byte digest that stands for a custom_id, to save memory."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def read_line(raw: bytes, models: Models) -> Request:
    """Parse and check a line. Raises `BadLine`."""
    value = _object(_text(raw))
    if problems := _problems(value, models):
        raise _joined(problems)
    body = value["body"]
    model = _served_name(body.get("model"), models)
    return Request(value["custom_id"], model, body, ENDPOINTS[value["url"]], _model_named(body))


def _problems(value: dict[str, Any], models: Models) -> list[BadLine]:
    """Return all problems with the fields of a line."""
    found = [BadLine("unknown_field", _unknown(name), _shorten(name)) for name in value if name not in _FIELDS]
    if missing := [name for name in _FIELDS if name not in value]:
        found.append(BadLine("missing_field", f"there is no {_join_words(missing, 'or')}", missing[0]))
    for name, check in _CHECKS.items():
        try:
            if name in value:
                check(value[name])
        except BadLine as bad:
            found.append(bad)
    try:
        if "body" in value:
            _check_body(value["body"], value.get("url"), models)
    except BadLine as bad:
        found.append(bad)
    return found


def _joined(problems: list[BadLine]) -> BadLine:
    """Join several problems into one that names the first five, with the code and field of the first."""
    first = problems[0]
    named = "; ".join(problem.message for problem in problems[:5])
    unnamed = len(problems[5:])
    more = f"; and {unnamed:,} more" if unnamed else ""
    example = f" {_EXAMPLE}" if first.code in ("unknown_field", "missing_field") else ""
    return BadLine(first.code, f"{named}{more}.{example}", first.param)


def _unknown(name: str) -> str:
    return f"{_quoted(name)} is not a field of a line"


def _check_method(value: object) -> None:
    if value != _METHOD:
        raise BadLine("invalid_method", f'method must be "{_METHOD}", not {_quoted(value)}', "method")


def _check_url(value: object) -> None:
    if not isinstance(value, str) or value not in ENDPOINTS:
        raise BadLine("invalid_url", f"url must be {_join_words([*ENDPOINTS], 'or')}, not {_quoted(value)}", "url")
    if problem := ENDPOINTS[value].missing():
        raise BadLine("invalid_url", f"url: {problem}", "url")


def _model_named(body: Mapping[str, Any]) -> str | None:
    named_model = body.get("model")
    return named_model if isinstance(named_model, str) else None


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadLine("invalid_utf8", f"not UTF-8: {error.reason} at byte {error.start + 1:,}.") from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadLine("invalid_json", f"not JSON: {json_problem(error)}.") from None
    if not isinstance(value, dict):
        raise BadLine("invalid_json", f"a line must be a JSON object, not {_quoted(value)}.")
    _refuse_too_deep(value)
    return value


def _refuse_too_deep(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    # More than a worker accepts. Python's own limit depends on the depth of the caller, so a line that was read once
    # might fail the second time.
    for _ in range(100):
        items = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise BadLine("invalid_json", "the JSON is nested more than 100 levels deep.")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _check_custom_id(value: object) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= 512:
        message = f"custom_id must be a string of 1 to 512 characters, not {_quoted(value)}"
        raise BadLine("invalid_custom_id", message, "custom_id")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadLine("invalid_custom_id", "custom_id holds half of a surrogate pair", "custom_id") from None


def _check_body(value: object, url: object, models: Models) -> None:
    """Check only what a worker could not report later, or would report for every line. Raises `BadLine`."""
    if not isinstance(value, dict):
        raise BadLine("invalid_body", f"body must be an object, not {_quoted(value)}", "body")
    if url == CHAT.url:
        _check_chat(value)
    _served_name(value.get("model"), models)


def _check_chat(body: dict[str, Any]) -> None:
    messages, n = body.get("messages"), body.get("n")
    if not isinstance(messages, list) or not messages:
        raise BadLine("invalid_body", "body.messages must be a list of at least one message", "body.messages")
    if n is not None and n != 1:
        raise BadLine("invalid_body", f"body.n must be 1, not {_quoted(n)}", "body.n")


_CHECKS: Mapping[str, Callable[[object], None]] = {
    "custom_id": _check_custom_id,
    "method": _check_method,
    "url": _check_url,
}


def _served_name(named_model: object, models: Models) -> str:
    if not isinstance(named_model, str | None):
        raise BadLine("invalid_model", f"body.model must be a string, not {_quoted(named_model)}", "body.model")
    name = models.get("*", keys.DEFAULT_MODEL) if named_model is None else mapped_name(named_model, models)
    try:
        keys.check_model_name(name)
    except ValueError:
        message = f"a model name must match {keys.MODEL_NAME}, and {_quoted(name)} does not; map it to a served name"
        raise BadLine("invalid_model", message, "body.model") from None
    return name


def _quoted(value: object) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
    return _shorten(json.dumps(value))


def _shorten(text: str) -> str:
    """Cut the text to 80 characters: it is quoted in the status object, and a line may hold 16 MB."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def _join_words(names: Sequence[str], word: str) -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))
