"""Child process that parses expensive bodies: see `reader`."""

import marshal
from typing import Any

from worker.bounded_json.strict import MAX_BODY_VALUES, TOO_DEEP, NotJson, count_values, first_lone_surrogate, loads
from worker.errors import JobFailure
from worker.process.frames import Send, handle_frames


def send_value(task: None, body: bytes, send: Send) -> None:
    """Send the value of a body, marshalled. Raises `JobFailure`."""
    value = parse_body(body)
    try:
        marshalled = marshal.dumps(value)
    except ValueError:  # its limit is 2,000 levels; it accepts all other values of JSON
        raise JobFailure("invalid_request", TOO_DEEP) from None
    send(None, marshalled)


def parse_body(body: bytes) -> Any:
    """Return the JSON value of a body. Raises `JobFailure`."""
    values = count_values(body)
    if values > MAX_BODY_VALUES:
        raise JobFailure(
            "too_large",
            f"The request holds {values:,} JSON values; this worker accepts {MAX_BODY_VALUES:,}. "
            "Shorten its lists and objects, or send them as text.",
        )
    try:
        value = loads(body)
    except NotJson as error:
        raise JobFailure("invalid_request", str(error)) from None
    # Checked here, since it would take the worker a second for two million strings.
    try:
        place = first_lone_surrogate(_request(value))
    except RecursionError:  # its limit is lower than that of `json`, from Python 3.13 on much lower
        raise JobFailure("invalid_request", TOO_DEEP) from None
    if place is not None:
        half = f"{place or 'The request'} holds half of a surrogate pair, which is no character."
        raise JobFailure("invalid_request", half)
    return value


def _request(envelope: Any) -> Any:
    match envelope:
        case {"a": [request]}:
            return request
    return envelope


if __name__ == "__main__":
    handle_frames(send_value)
