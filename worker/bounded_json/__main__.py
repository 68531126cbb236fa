"""Child process that reads one expensive body from stdin and writes a marshalled verdict to stdout: see `reader`."""

import marshal
import sys
from typing import Any

from worker.bounded_json.size import MAX_BODY_VALUES, count_values, limits
from worker.bounded_json.strict import TOO_DEEP, NotJson, loads
from worker.bounded_json.surrogates import first_lone_surrogate
from worker.process.rlimits import limit_resources, lower_priority


def verdict(body: bytes) -> tuple[str, Any]:
    """Return "json" and the value, "refused" and a sentence, or "too many" and the number of values."""
    values = count_values(body)
    if values > MAX_BODY_VALUES:
        return "too many", values
    try:
        value = loads(body)
    except NotJson as error:
        return "refused", str(error)
    # Checked here, since it would take the worker a second for two million strings.
    try:
        place = first_lone_surrogate(_request(value))
    except RecursionError:  # its limit is lower than that of `json`, from Python 3.13 on much lower
        return "refused", TOO_DEEP
    if place is not None:
        return "refused", f"{place or 'The request'} holds half of a surrogate pair, which is no character."
    return "json", value


def answer(body: bytes) -> bytes:
    """Return the verdict, marshalled."""
    result = verdict(body)
    try:
        return marshal.dumps(result)
    except ValueError:  # its limit is 2,000 levels; it accepts all other values of JSON
        return marshal.dumps(("refused", TOO_DEEP))


def _request(envelope: Any) -> Any:
    match envelope:
        case {"a": [request]}:
            return request
    return envelope


def main() -> None:
    """Read a body from stdin, and write its verdict to stdout. Ends the process by a signal at a resource limit."""
    body = sys.stdin.buffer.read()
    cpu_s, address_bytes = limits(len(body))
    lower_priority()
    limit_resources(cpu_s=cpu_s, address_bytes=address_bytes)
    sys.stdout.buffer.write(answer(body))


if __name__ == "__main__":
    main()
