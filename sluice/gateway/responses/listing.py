"""Lists of input items, in pages."""

from collections.abc import Mapping, Sequence
from typing import Any

from sluice.gateway.fields import one_of, refusal

_DEFAULT_LIMIT = 20
_MOST = 100


def page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of items that the query's `limit`, `order` and `after` select. Raises `ApiError`."""
    order = one_of(query.get("order", "desc"), ("asc", "desc"), "order")
    ordered = list(items if order == "asc" else reversed(items))
    rest = ordered[_start(ordered, query.get("after")) :]
    shown = rest[: _limit(query.get("limit"))]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(rest) > len(shown),
    }


def _limit(given: str | None) -> int:
    if given is None:
        return _DEFAULT_LIMIT
    if not (given.isascii() and given.isdigit() and len(given) < 4 and 1 <= int(given) <= _MOST):
        raise refusal("limit", f"it must be a whole number from 1 to {_MOST}.")
    return int(given)


def _start(ordered: Sequence[dict[str, Any]], after: str | None) -> int:
    if after is None:
        return 0
    for index, item in enumerate(ordered, 1):
        if item["id"] == after:
            return index
    raise refusal("after", "there is no item with this id among the response's.")
