"""`sluice prefix`: lists, pins, drops and computes the prefixes that workers keep on disk."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sluice.cli.errors import CliError, needs_worker
from sluice.cli.options import AsJson
from sluice.cli.terminal.output import format_duration, print_json, print_table
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


if TYPE_CHECKING:
    from worker.chat.warm import Warmed
    from worker.prefix_store.encryption import Encryption
    from worker.prefix_store.listing import Listing, StoredPrefix

_DIR = "SLUICE_PREFIX_DISK_DIR"
_KEY = "SLUICE_PREFIX_DISK_KEY"
_NO_FOLDER = f"no folder: give --dir, or set {_DIR}."

FolderOption = Annotated[
    Path | None,
    typer.Option("--dir", metavar="FOLDER", help=f"The folder. Default: {_DIR} from the environment or `.env`."),
]
_ID_HELP = "Id of a prefix, as in `sluice prefix list`, or its first digits."
PrefixId = Annotated[str, typer.Argument(help=_ID_HELP, metavar="ID")]

prefix = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@prefix.callback()
def about() -> None:
    """Show, pin, drop and compute the cached prefixes on disk.

    They are in the folder that workers have as SLUICE_PREFIX_DISK_DIR. No worker has to run. Tenants of encrypted
    prefixes are shown if SLUICE_PREFIX_DISK_KEY is set. Both are read from the environment or `.env`, as workers do.

    \b
    Example:
      sluice prefix list
    """


@prefix.command("list")
def list_prefixes(folder: FolderOption = None, as_json: AsJson = False) -> None:
    """List the prefixes on disk, the most recently used first.

    The sizes count files that several prefixes share once for each. RAM is what running workers hold of them in memory;
    it is a few seconds old. Hits are hits from disk: how often a file of the prefix was read. Hits in memory read no
    file and do not count; requests that wait for the same reading count once. The age is that of the last file.
    "No start": files before it are missing, so it is found only while memory holds them. With --json, print an object
    for each prefix; there `complete` is false for "no start". "Image": the features that the vision encoder has
    computed of an image, for all prompts with it.

    \b
    Examples:
      sluice prefix list
      sluice prefix list --json | jq -r 'select(.pinned).id'
    """
    listing = _listing(folder)
    rows = [facts(listing, each) for each in listing.prefixes]
    if as_json:
        for row in rows:
            print_json(row)
    elif rows:
        print_prefixes(rows, listing)
    else:
        note("there are no prefixes.")


@prefix.command()
def pin(id: PrefixId, folder: FolderOption = None) -> None:
    """Keep a prefix from being removed for space.

    It still counts for the quota. Exit codes: 0, or 2 if there is no such prefix.
    """
    listing = _listing(folder)
    found = _find(listing, id)
    listing.pin(found)
    note(f"{found.id} is pinned: {found.tokens:,} tokens")


@prefix.command()
def unpin(id: PrefixId, folder: FolderOption = None) -> None:
    """Let a pinned prefix be removed for space again.

    Files that other pinned prefixes share stay pinned. Exit codes: 0, 1 if the prefix is not pinned, or 2 if there is
    no such prefix.
    """
    listing = _listing(folder)
    found = _find(listing, id)
    if not found.pinned:
        raise CliError(f"{found.id}: it is not pinned; `sluice prefix list` shows which are.", exit_code=1)
    listing.unpin(found)
    note(f"{found.id} is not pinned any more")


@prefix.command()
def drop(
    id: Annotated[str | None, typer.Argument(help=_ID_HELP, metavar="[ID]")] = None,
    tenant: Annotated[str | None, typer.Option(help="Drop all prefixes of this tenant instead.")] = None,
    outdated: Annotated[
        bool, typer.Option("--outdated", help="Drop all that no worker can use any more instead, also pinned ones.")
    ] = False,
    folder: FolderOption = None,
) -> None:
    """Delete a prefix, those of a tenant, or outdated ones from disk.

    Files that other prefixes share are kept; a pinned prefix and one that continues it are two. A tenant has prefixes
    of its own only if workers run with SLUICE_PREFIX_CACHE_PER_TENANT. What running workers hold in memory is not
    deleted, and may be written again: drop prefixes while no worker runs to be sure. Outdated are the prefixes of a
    model whose weights or library have changed since, and files of other versions of Sluice. Exit codes: 0, 1 if files
    of a tenant may be left since they cannot be read, or 2 if there is no such prefix or tenant.

    \b
    Examples:
      sluice prefix drop 3f9c01a2b4d5
      sluice prefix drop --tenant acme
      sluice prefix drop --outdated
    """
    if (id is not None) + (tenant is not None) + outdated != 1:
        raise CliError("prefix drop: give either an ID, --tenant or --outdated.")
    listing = _listing(folder)
    if tenant is not None:
        _drop_tenant(listing, tenant)
    elif outdated:
        found = [each for each in listing.prefixes if listing.is_outdated(each)]
        _drop(listing, found, stale=True)
    else:
        _drop(listing, [_find(listing, id or "")])


def _drop(listing: "Listing", prefixes: "list[StoredPrefix]", *, stale: bool = False) -> None:
    """Drop prefixes, and tell what was removed. `stale`: drop files of other versions too."""
    dropped = listing.drop(prefixes)
    removed = dropped.removed + (listing.drop_stale() if stale else 0)
    message = f"dropped {len(prefixes)} prefix{'es' * (len(prefixes) != 1)}, {_files(removed)}"
    if dropped.kept:
        message += f"; kept {_files(dropped.kept)} that other prefixes share"
    if dropped.pinned:
        message += f", {dropped.pinned} of them pinned"
    note(message)
    if dropped.failed:
        failed = f"{_files(len(dropped.failed))} could not be removed, such as {dropped.failed[0]}"
        raise CliError(f"{failed}; check the permissions of the folder.", exit_code=1)


def _files(number: int) -> str:
    return f"{number} file{'s' * (number != 1)}"


def _drop_tenant(listing: "Listing", tenant: str) -> None:
    """Drop the prefixes of a tenant. Raises `CliError` if there are none, or if some files cannot be read."""
    if not tenant:
        raise CliError("--tenant: it is empty; give the name of a tenant.")
    tenants = {each: listing.tenant(each) for each in listing.prefixes}
    found = [each for each, name in tenants.items() if name == tenant]
    unread = {file for each, name in tenants.items() if name is None for file in each.files}
    num_unread = len(unread - {file for each in found for file in each.files}) + len(listing.stale)
    if found:
        _drop(listing, found)
    if num_unread:
        raise CliError(
            f"--tenant: {num_unread} file{'s' * (num_unread != 1)} cannot be read and may be of {tenant}; set {_KEY} "
            "to the key that they were written with, or drop them by their IDs or with --outdated.",
            exit_code=1,
        )
    if not any(tenants.values()):
        raise CliError(
            "--tenant: all prefixes here are shared by tenants; workers keep them apart only with "
            "SLUICE_PREFIX_CACHE_PER_TENANT."
        )
    if not found:
        raise CliError(f"--tenant: {tenant} has no prefixes here.")


@prefix.command()
def warm(
    file: Annotated[
        Path, typer.Option("--file", metavar="FILE", help="JSON: system prompts, lists of messages, or requests.")
    ],
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER_OR_HUB_ID", help="SLUICE_MODEL: the model of the workers.")
    ] = None,
    folder: FolderOption = None,
) -> None:
    """Compute the prompts of a file, write them to disk, and pin them.

    Loads the model itself, with the settings that a worker would have here, so there must be memory for it beside those
    that run. Workers find the prefixes within seconds. A prompt that is on disk already is not computed again if
    loading it is faster. Models with recurrent or sliding-window layers keep no prompt of fewer than 16 tokens. Says
    for each conversation what is on disk, and why the rest is not. Exit codes: 0 if all are on disk, 1 if some are
    not, or only in part, or 2 if the file or a setting is wrong.

    \b
    Examples:
      sluice prefix warm --file messages.json
      echo '["You answer the customers of a bookshop. Answer in one or two short sentences."]' > prompts.json
      sluice prefix warm --file prompts.json
    """
    results = _warm(file, {"model": model, "prefix_disk_dir": folder})
    if failed := sum(bool(each.missing) for each in results):
        raise CliError(f"{failed} of {len(results)} conversations are not on disk as a whole; see above.", exit_code=1)


def _warm(file: Path, given: dict[str, object]) -> "list[Warmed]":
    with needs_worker():
        from worker.app import warm_prefixes
        from worker.chat.warm import BadWarmFile, read_conversations
        from worker.errors import CannotStart
        from worker.settings import read_settings
    results = list["Warmed"]()

    def report(result: "Warmed") -> None:
        results.append(result)
        note(_warmed(result))

    try:
        read_conversations(file)
        settings = read_settings(prefix_warm=file, **{name: each for name, each in given.items() if each is not None})
        if settings.prefix_disk_dir is None:
            raise CliError(_NO_FOLDER)
        asyncio.run(warm_prefixes(settings, report))
    except BadWarmFile as error:
        raise CliError(f"--file: {file}: {error}") from None
    except CannotStart as error:
        raise CliError(str(error)) from None
    return results


def _warmed(result: "Warmed") -> str:
    label = f"conversation {result.number}"
    if result.stored is None or not result.stored.tokens:
        return f"{label}: nothing is written: {result.missing}"
    written = f"{result.stored.tokens:,} tokens are on disk and pinned"
    if result.missing:
        return f"{label}: {written}, of {result.tokens:,}; the rest is not written: {result.missing}"
    new = f"{result.stored.written_bytes / 1e6:,.1f} MB are new" if result.stored.written_bytes else "nothing is new"
    return f"{label}: {written}, {new}; {result.cached:,} were found on disk"


def _listing(folder: Path | None) -> "Listing":
    with needs_worker():
        from worker.environment import read_unchecked
        from worker.prefix_store.listing import Listing
        from worker.settings import Settings
    written = read_unchecked(Settings)
    if folder is None and "prefix_disk_dir" not in written:
        raise CliError(_NO_FOLDER)
    path = (folder or Path(written["prefix_disk_dir"])).expanduser()
    try:
        return Listing(path, _encryption(written.get("prefix_disk_key")))
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}; give the folder that workers have as {_DIR}.") from None


def _encryption(key: str | None) -> "Encryption | None":
    """Return the workers' key, which opens the tenants of encrypted prefixes; None if there is none."""
    from worker.prefix_store.encryption import Encryption, decode_key

    try:
        return Encryption(decode_key(key)) if key else None
    except (ImportError, ValueError) as error:
        raise CliError(f"{_KEY}: {error}.") from None


def _find(listing: "Listing", id: str) -> "StoredPrefix":
    if not id.strip():
        raise CliError("ID: it is empty; give the id of a prefix, or its first digits.")
    found = [each for each in listing.prefixes if each.id.startswith(id.lower())]
    if len(found) != 1:
        problem = "several prefixes begin with it" if found else "there is no such prefix"
        raise CliError(f"{id}: {problem}; `sluice prefix list` shows them.")
    return found[0]
