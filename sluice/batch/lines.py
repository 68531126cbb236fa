"""A line of an input file: what it must be, and what is wrong with one that is not. docs/batches.md lists the rules."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from sluice import wire

Models = Mapping[str, str]  # what a file calls a model, to the name it is served by; "*" is any other

_METHOD, _URL = "POST", "/v1/chat/completions"
_FIELDS = ("custom_id", "method", "url", "body")
_EXAMPLE = (
    f'A line looks like {{"custom_id": "a", "method": "{_METHOD}", "url": "{_URL}", "body": {{"messages": [...]}}}}.'
)
_MOST_CUSTOM_ID = 512  # characters
_MOST_NAMED = 5  # problems of one line
# More than a worker takes. Python's own limit is nearer for a deeper caller: what was read once might not be again.
_MOST_LEVELS = 100
_DEFAULT_MODEL = "default"


class BadLine(Exception):
    """Why a line cannot be run: the name of the rule, a sentence, and the field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


@dataclass(frozen=True, slots=True)
class Request:
    """A valid line. `asked` is the model that it names, `model` the one that serves it."""

    custom_id: str
    model: str  # that it is served by
    body: dict[str, Any]
    asked: str | None = None  # the model that the line names

    @property
    def digest(self) -> bytes:
        """Digest of the custom_id."""
        return digest(self.custom_id)

    def as_job(self) -> dict[str, Any]:
        """Return the body to queue. It does not end for want of subscribers, since a line has none."""
        return {**self.body, "model": self.model, "on_disconnect": "continue"}


def digest(custom_id: str) -> bytes:
    """Return a 16-byte digest that stands for a custom_id, to save memory."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def read_line(raw: bytes, models: Models) -> Request:
    """Parse and check a line. Raises `BadLine`."""
    said = _object(_text(raw))
    if problems := _problems(said, models):
        raise _joined(problems)
    body = said["body"]
    return Request(said["custom_id"], _served(body.get("model"), models), body, _asked(body))


def _problems(said: dict[str, Any], models: Models) -> list[BadLine]:
    """All that is wrong with the fields of a line."""
    found = [BadLine("unknown_field", _unknown(name), _cut(name)) for name in said if name not in _FIELDS]
    if missing := [name for name in _FIELDS if name not in said]:
        found.append(BadLine("missing_field", f"there is no {_listed(missing, 'or')}", missing[0]))
    for name, check in _CHECKS.items():
        try:
            if name in said:
                check(said[name], models)
        except BadLine as bad:
            found.append(bad)
    return found


def _joined(problems: list[BadLine]) -> BadLine:
    """One problem of them all, by the name of the first."""
    first = problems[0]
    named = "; ".join(problem.message for problem in problems[:_MOST_NAMED])
    more = f"; and {len(problems) - _MOST_NAMED:,} more" if len(problems) > _MOST_NAMED else ""
    example = f" {_EXAMPLE}" if first.code in ("unknown_field", "missing_field") else ""
    return BadLine(first.code, f"{named}{more}.{example}", first.param)


def _unknown(name: str) -> str:
    return f"{_shown(name)} is not a field of a line"


def _check_method(said: object, _: Models) -> None:
    if said != _METHOD:
        raise BadLine("invalid_method", f'method must be "{_METHOD}", not {_shown(said)}', "method")


def _check_url(said: object, _: Models) -> None:
    if said != _URL:
        raise BadLine("invalid_url", f'url must be "{_URL}", not {_shown(said)}', "url")


def _asked(body: Mapping[str, Any]) -> str | None:
    asked = body.get("model")
    return asked if isinstance(asked, str) else None


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadLine("invalid_utf8", f"not UTF-8: {error.reason} at byte {error.start + 1:,}.") from None


def _object(text: str) -> dict[str, Any]:
    try:
        said = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise BadLine("invalid_json", f"not JSON: {error.msg} at character {error.pos + 1:,}.") from None
    except RecursionError:
        raise BadLine("invalid_json", "the JSON is nested too deeply.") from None
    except ValueError as error:
        raise BadLine("invalid_json", f"not JSON: {error}.") from None
    if not isinstance(said, dict):
        raise BadLine("invalid_json", f"a line must be a JSON object, not {_shown(said)}.")
    _refuse_too_deep(said)
    return said


def _refuse_too_deep(said: dict[str, Any]) -> None:
    level: list[Any] = [said]
    for _ in range(_MOST_LEVELS):
        items = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise BadLine("invalid_json", f"the JSON is nested more than {_MOST_LEVELS} levels deep.")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no word for {name}")


def _check_custom_id(said: object, _: Models) -> None:
    if not isinstance(said, str) or not 1 <= len(said) <= _MOST_CUSTOM_ID:
        why = f"custom_id must be a string of 1 to {_MOST_CUSTOM_ID} characters, not {_shown(said)}"
        raise BadLine("invalid_custom_id", why, "custom_id")
    try:
        said.encode()
    except UnicodeEncodeError:
        raise BadLine("invalid_custom_id", "custom_id holds half of a surrogate pair", "custom_id") from None


def _check_body(said: object, models: Models) -> None:
    """Check only what a worker cannot report later, or would report for every line."""
    if not isinstance(said, dict):
        raise BadLine("invalid_body", f"body must be an object, not {_shown(said)}", "body")
    messages, answers = said.get("messages"), said.get("n")
    if not isinstance(messages, list) or not messages:
        raise BadLine("invalid_body", "body.messages must be a list of at least one message", "body.messages")
    if answers is not None and answers != 1:
        raise BadLine("invalid_body", f"body.n must be 1, not {_shown(answers)}", "body.n")
    _served(said.get("model"), models)


_CHECKS: Mapping[str, Callable[[object, Models], None]] = {
    "custom_id": _check_custom_id,
    "method": _check_method,
    "url": _check_url,
    "body": _check_body,
}


def _served(asked: object, models: Models) -> str:
    if asked is None:
        return models.get("*", _DEFAULT_MODEL)
    if not isinstance(asked, str):
        raise BadLine("invalid_model", f"body.model must be a string, not {_shown(asked)}", "body.model")
    name = models.get(asked) or models.get("*", asked)
    try:
        wire.check_model_name(name)
    except ValueError:
        why = f"a model name must match {wire.MODEL_NAME}, and {_shown(name)} does not; map it to a served name"
        raise BadLine("invalid_model", why, "body.model") from None
    return name


def _shown(value: object) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    """A problem is told in the status object, of which a line of 16 MB must not become a part."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def _listed(names: Sequence[str], word: str) -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))
