"""The list of prefixes on disk, as JSON and as tables."""

import time
from typing import TYPE_CHECKING, Any, Literal

from sluice.cli.terminal.output import format_duration, print_table
from sluice.cli.terminal.view import note

if TYPE_CHECKING:
    from worker.prefix_store.listing import Listing, StoredPrefix


def facts(listing: "Listing", each: "StoredPrefix") -> dict[str, object]:
    """Return what is known of a prefix, as `sluice prefix list --json` prints it."""
    content = listing.content(each)
    return {
        "id": each.id,
        "model": listing.model_name(each),
        "model_digest": each.model,
        "tenant": listing.tenant(each) or None,
        "kind": content and content.kind,
        "tokens": each.tokens,
        "bytes": each.nbytes,
        "memory_bytes": each.held.nbytes,
        "hits": each.hits,
        "memory_uses": each.held.uses,
        "age_s": content and round(max(0.0, time.time() - content.created_s), 1),
        "used_s_ago": round(max(0.0, time.time() - each.used_s), 1),
        "pinned": each.pinned,
        "complete": each.complete,
        "outdated": listing.is_outdated(each),
    }


def print_prefixes(rows: list[dict[str, object]], listing: "Listing") -> None:
    """Print a table for each model, without columns that are empty."""
    for digest, model in {str(row["model_digest"]): row["model"] for row in rows}.items():
        cells = [_cells(row) for row in rows if row["model_digest"] == digest]
        kept = [name for name in _COLUMNS if any(row[name] for row in cells)]
        table = [[row[name] for name in kept] for row in cells]
        columns = {name: _COLUMNS[name] for name in kept}
        print_table(f"Prefixes of model {model or digest}", columns, table, whole=_WHOLE)
    note(
        f"{listing.nbytes / 1e6:,.1f} MB on disk, files of other programs included; "
        f"{listing.memory_bytes / 1e6:,.1f} MB of prefixes in the memory of running workers"
    )


_COLUMNS: dict[str, Literal["left", "right"]] = {
    "id": "left",
    "tenant": "left",
    "tokens": "right",
    "disk MB": "right",
    "RAM MB": "right",
    "hits": "right",
    "age": "right",
    "used": "right",
    "notes": "left",
}
_WHOLE = ("id", "tokens", "RAM MB", "hits", "age", "used")  # in a terminal of 80 columns


def _cells(row: dict[str, Any]) -> dict[str, str]:
    remarks = {
        "image": row["kind"] == "image",
        "pinned": row["pinned"],
        "no start": not row["complete"],
        "outdated": row["outdated"],
    }
    return {
        "id": str(row["id"]),
        "tenant": str(row["tenant"] or ""),
        "tokens": f"{row['tokens']:,}",
        "disk MB": _megabytes(row["bytes"]),
        "RAM MB": _megabytes(row["memory_bytes"]),
        "hits": f"{row['hits']:,}",
        "age": "?" if row["age_s"] is None else _short(row["age_s"]),
        "used": _short(row["used_s_ago"]),
        "notes": ", ".join(remark for remark, holds in remarks.items() if holds),
    }


def _megabytes(nbytes: int) -> str:
    """Return at most six characters up to 100 GB."""
    return f"{nbytes / 1e6:,.1f}" if nbytes < 100e6 else f"{nbytes / 1e6:,.0f}"


def _short(seconds: float) -> str:
    """Return the largest unit of a duration: `3d`, `5min`."""
    return "".join(format_duration(seconds).split()[:2])
