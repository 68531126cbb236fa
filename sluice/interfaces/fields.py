"""Reads values of a request's body. A wrong value is refused with its place in the body."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sluice.contract.keys import DEFAULT_MODEL
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError


def refusal(param: str, problem: str, form: ErrorForm = ErrorForm.INVALID_VALUE) -> ApiError:
    """Return the error for a value, named by its place in the body: `input[2].content`."""
    name = param.encode("ascii", "backslashreplace").decode()[:200]  # clients choose the name
    return ApiError(form, f"{name}: {problem}", param=name)


def string(value: object, param: str) -> str:
    """Return a string. Raises `ApiError`."""
    if not isinstance(value, str):
        raise refusal(param, "it must be a string.", ErrorForm.INVALID_TYPE)
    return value


def optional_string(value: object, param: str) -> str | None:
    """Return a string, or None. Raises `ApiError`."""
    return None if value is None else string(value, param)


def flag(value: object, param: str, default: bool) -> bool:
    """Return a boolean, or the default for null. Raises `ApiError`."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refusal(param, "it must be true or false.", ErrorForm.INVALID_TYPE)
    return value


def whole_number(value: object, param: str, least: int = 1) -> int | None:
    """Return a whole number of at least `least`, or None. Raises `ApiError`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refusal(param, f"it must be a whole number of at least {least}.")
    return value


def mapping(value: object, param: str) -> dict[str, Any]:
    """Return an object. Raises `ApiError`."""
    if not isinstance(value, dict):
        raise refusal(param, "it must be an object.", ErrorForm.INVALID_TYPE)
    return value


def optional_mapping(value: object, param: str) -> dict[str, Any]:
    """Return an object, empty for null. Raises `ApiError`."""
    return {} if value is None else mapping(value, param)


def entries(value: object, param: str) -> Iterable[tuple[str, Any]]:
    """Return the items of a list, each with its place. Raises `ApiError`."""
    if not isinstance(value, list):
        raise refusal(param, "it must be a list.", ErrorForm.INVALID_TYPE)
    return ((f"{param}[{index}]", each) for index, each in enumerate(value))


def option(value: object, allowed: Collection[str], param: str) -> str:
    """Return one of the allowed strings. Raises `ApiError`."""
    if not isinstance(value, str) or value not in allowed:
        raise refusal(param, f"it must be one of {', '.join(sorted(allowed))}.")
    return value


def check_known(value: Mapping[str, Any], known: Collection[str], param: str = "") -> None:
    """Refuse the first field that is neither known nor null. Raises `ApiError`."""
    for name, each in value.items():
        if name not in known and each is not None:
            place = f"{param}.{name}" if param else name
            raise refusal(place, "it is not supported; leave it out.", ErrorForm.UNSUPPORTED_PARAMETER)


def requested_model(body: Mapping[str, Any]) -> str:
    """Return the model that a request names. Raises `ApiError`."""
    model = body.get("model")
    if model is None:
        return DEFAULT_MODEL
    if not isinstance(model, str):
        raise ApiError(ErrorForm.INVALID_TYPE, "model: it must be a string.", param="model")
    return model
