"""Child process that reads one expensive body from stdin and writes a marshalled verdict to stdout: see `reader`."""

import marshal
import sys
from typing import Any

from worker.bounded_json.size import MAX_BODY_VALUES, count_values, limits
from worker.bounded_json.strict import TOO_DEEP, NotJson, loads
from worker.bounded_json.surrogates import first_lone_surrogate
from worker.process.rlimits import limit_resources


def verdict(body: bytes) -> tuple[str, Any]:
    """Return "json" and the value, "refused" and a sentence, or "too many" and the number of values."""
    values = count_values(body)
    if values > MAX_BODY_VALUES:
        return "too many", values
    try:
        value = loads(body)
    except NotJson as why:
        return "refused", str(why)
    # The worker would take a second to read two million of these back.
    try:
        place = first_lone_surrogate(_request(value))
    except RecursionError:  # less deep than what json reads, from Python 3.13 on much less
        return "refused", TOO_DEEP
    if place is not None:
        return "refused", f"{place or 'The request'} holds half of a surrogate pair, which is no character."
    return "json", value


def answer(body: bytes) -> bytes:
    """Return the verdict, marshalled."""
    said = verdict(body)
    try:
        return marshal.dumps(said)
    except ValueError:  # its limit is 2,000 levels; json has nothing else that it refuses
        return marshal.dumps(("refused", TOO_DEEP))


def _request(envelope: Any) -> Any:
    match envelope:
        case {"a": [request]}:
            return request
    return envelope


def main() -> None:
    body = sys.stdin.buffer.read()
    cpu_s, address_bytes = limits(len(body))
    limit_resources(cpu_s=cpu_s, address_bytes=address_bytes)
    sys.stdout.buffer.write(answer(body))


if __name__ == "__main__":
    main()
