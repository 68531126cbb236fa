"""`sluice keys`: creates, lists and revokes the API keys of `sluice serve`."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import JustifyMethod

from sluice.batch.source import UNITS_S
from sluice.cli.errors import CliError, needs_gateway
from sluice.cli.options import AsJson, integer, lane
from sluice.cli.terminal.output import print_json, print_table
from sluice.cli.terminal.view import note
from sluice.contract.keys import LANES

if TYPE_CHECKING:
    from sluice.gateway.key_file import KeyFile  # an extra of the package

File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="PATH",
        envvar="SLUICE_SERVE_KEYS",
        help="The file of the keys.  [default: SLUICE_SERVE_KEYS in .env]",
    ),
]
_LIMIT = integer(1, 10**12)

keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@keys.callback()
def _about() -> None:
    """Create, list and revoke the API keys of `sluice serve`.

    The file holds a hash of each key, not the key. Running gateways read it again within a second after a change.

    \b
    Example:
      sluice keys create --tenant acme --requests-per-minute 60
    """


@keys.command()
def create(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Tenant whose jobs the key may send and read.")],
    requests_per_minute: Annotated[
        int | None, typer.Option(parser=_LIMIT, metavar="N", help="Limit of requests.  [default: none]")
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(parser=_LIMIT, metavar="N", help="Limit of tokens, prompts and answers.  [default: none]"),
    ] = None,
    batch_bytes: Annotated[
        int | None,
        typer.Option(parser=_LIMIT, metavar="N", help="Limit of bytes in the tenant's files.  [default: none]"),
    ] = None,
    batch_runs: Annotated[
        int | None,
        typer.Option(parser=_LIMIT, metavar="N", help="Limit of the tenant's open batches.  [default: none]"),
    ] = None,
    lanes: Annotated[
        str | None, typer.Option(metavar="LANE,...", help="Lanes that the key may use.  [default: both]")
    ] = None,
    models: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Models that the key may use.  [default: all]")
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="When it expires: 90d, 12h, 30m, or 2027-01-31 (UTC).  [default: never]"),
    ] = None,
    note_text: Annotated[str, typer.Option("--note", metavar="TEXT", help="A remark that stays in the file.")] = "",
    file: File = None,
) -> None:
    """Create a key, and print it: it is shown this once.

    The key goes to stdout, all else to stderr. A missing file is created, readable by its owner only.

    \b
    Example:
      sluice keys create --tenant acme --expires 90d --file keys.json
    """
    fields: dict[str, Any] = {
        "tenant": tenant,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "batch_bytes": batch_bytes,
        "batch_runs": batch_runs,
        "models": None if models is None else tuple(models.split(",")),
        "expires": None if expires is None else _expiry(expires),
        "note": note_text,
    }
    if lanes is not None:
        fields["lanes"] = tuple(lane(each) for each in lanes.split(","))
    secret, key_id = _create(file, fields)
    print(secret)
    note(f"{key_id} is created, for the tenant {tenant}; the key above is not shown again")


@keys.command("list")
def list_keys(file: File = None, as_json: AsJson = False) -> None:
    """List the keys, without the keys themselves.

    \b
    Example:
      sluice keys list --json | jq -r .id
    """
    found = _read(file)
    if not found:
        note("there are no keys.")
    elif as_json:
        for key in found:
            print_json(key)
    else:
        _print_keys(found)


@keys.command()
def revoke(
    id: Annotated[str, typer.Argument(help="Id of the key, as in `sluice keys list`.", metavar="ID")],
    file: File = None,
) -> None:
    """Remove a key from the file. Answers that have begun are completed.

    \b
    Example:
      sluice keys revoke k-5f2c9a01
    """
    _revoke(file, id)
    note(f"{id} is revoked")


def _create(file: Path | None, fields: dict[str, Any]) -> tuple[str, str]:
    """Add a new key to the file, and return it with its id."""
    with needs_gateway():
        from sluice.gateway.key_file import KeyFile, new_key
    try:
        secret, key = new_key(**fields)
    except ValueError as error:
        raise CliError(f"{error}.") from None

    def with_key(content: KeyFile) -> KeyFile:
        return content.model_copy(update={"keys": (*content.keys, key)})

    _edit(_path(file), with_key)
    return secret, key.id


def _revoke(file: Path | None, id: str) -> None:
    with needs_gateway():
        from sluice.gateway.key_file import KeyFile
    path = _path(file)

    def without(content: KeyFile) -> KeyFile:
        kept = tuple(key for key in content.keys if key.id != id)
        if len(kept) == len(content.keys):
            raise CliError(f"there is no key {id!r} in {path}; `sluice keys list` shows the ids.")
        return content.model_copy(update={"keys": kept})

    _edit(path, without)


def _read(file: Path | None) -> list[dict[str, Any]]:
    """Return the keys without their hashes, and if they have expired."""
    with needs_gateway():
        from sluice.gateway.key_file import BadKeyFile, read_key_file
    try:
        content = read_key_file(_path(file))
    except BadKeyFile as error:
        raise CliError(str(error)) from None
    now = datetime.now(UTC)
    return [
        {**key.model_dump(mode="json", exclude={"sha256"}), "expired": key.has_expired(now)} for key in content.keys
    ]


def _edit(path: Path, change: "Callable[[KeyFile], KeyFile]") -> None:
    from sluice.gateway.key_file import BadKeyFile, edit

    try:
        edit(path, change)
    except BadKeyFile as error:
        raise CliError(str(error)) from None
    except OSError as error:
        raise CliError(f"{path}: it cannot be written: {error.strerror}.") from None


def _path(file: Path | None) -> Path:
    """Return the file that the option or the setting names."""
    from sluice.gateway.settings import read_variables

    if path := file or read_variables(Path(".env")).get("SLUICE_SERVE_KEYS"):
        return Path(path)
    raise CliError("--file: the file of the keys is not given; name one, or set SLUICE_SERVE_KEYS.")


def _expiry(text: str) -> datetime:
    """Return the time that an option names. Raises `CliError`, also for a time in the past."""
    when = _named_time(text)
    if when <= datetime.now(UTC):
        raise CliError(f"--expires: {text!r} is in the past; name a time to come, such as 90d.")
    return when


def _named_time(text: str) -> datetime:
    if duration := re.fullmatch(r"(\d{1,6})([mhd])", text):
        return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=int(duration[1]) * UNITS_S[duration[2]])
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise CliError(f"--expires: {text!r} is not a time; write 90d, 12h, 30m or 2027-01-31.") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _print_keys(found: list[dict[str, Any]]) -> None:
    left: JustifyMethod = "left"
    columns = ["id", "tenant", "per minute", "may use", "expires (UTC)"]
    rows = [[key["id"], key["tenant"], _limits(key), _rights(key), _end(key)] for key in found]
    if any(key["note"] for key in found):
        columns.append("note")
        rows = [[*row, key["note"]] for row, key in zip(rows, found, strict=True)]
    print_table("Keys", dict.fromkeys(columns, left), rows)


def _limits(key: dict[str, Any]) -> str:
    limits = {"requests": key["requests_per_minute"], "tokens": key["tokens_per_minute"]}
    return ", ".join(f"{limit:,} {name}" for name, limit in limits.items() if limit is not None) or "no limit"


def _rights(key: dict[str, Any]) -> str:
    lanes = [] if len(key["lanes"]) == len(LANES) else [f"lane {', '.join(key['lanes'])}"]
    models = [] if key["models"] is None else [f"models {', '.join(key['models'])}"]
    return "; ".join([*lanes, *models]) or "all"


def _end(key: dict[str, Any]) -> str:
    if key["expires"] is None:
        return "never"
    when = f"{datetime.fromisoformat(key['expires']).astimezone(UTC):%Y-%m-%d %H:%M}"
    return f"{when}, expired" if key["expired"] else when
