"""`sluice models`: what can be served on a server, and under which names."""

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from sluice.cli import worker_commands
from sluice.cli.errors import CliError, connected, sentence
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.output import print_json, print_table
from sluice.cli.terminal.view import note
from sluice.client import Client
from sluice.contract.keys import LANES
from sluice.presence import serves
from sluice.wording import counted

models = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@models.callback()
def _about() -> None:
    """List the models of a server and of this machine; download, delete and name them.

    \b
    Examples:
      sluice models list
      sluice models pull mlx-community/Qwen3-4B-4bit
      sluice models alias fast qwen-4b
    """


@models.command("list")
def list_models(
    served: Annotated[
        bool, typer.Option("--served", help="Only those of the server; look at no checkpoint here.")
    ] = False,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """List what workers serve, the aliases, and the checkpoints on this machine.

    Checkpoints are those in the cache of Hugging Face, and folders that the settings or workers of this machine name,
    with their sizes on disk. Each is checked as by `sluice check`, which takes a second or a few: `served` is the
    workers here that have it, or why this version would not serve it. Without a worker installed here, and without a
    server, the other part is listed.

    With --json, print an object for each name: `model` is what an alias stands for, else null; `workers` counts those
    that take jobs. Those of checkpoints have `checkpoint` in place of `name`. Exit codes: 0, or 2 if there is neither
    a server nor a worker installed here.

    \b
    Examples:
      sluice models list
      sluice models list --served --json | jq -r 'select(.workers > 0).name'
      sluice models list --json | jq -r 'select(.servable == false) | .checkpoint, .problem'
    """
    look = None if served else worker_commands.optional("models.checkpoints")
    found, workers = _server(redis_url, required=look is None)
    here = [each for each in workers if each.get("host") == socket.gethostname()]
    opened = {path for each in here for path in checkpoints_of(each) or ()}
    checkpoints = look(opened) if look else []
    for each in checkpoints:
        names = {each["checkpoint"], each["path"]}
        each["workers"] = sorted(worker["name"] for worker in here if names & {*(checkpoints_of(worker) or ())})
    if as_json:
        for each in (*(found or ()), *checkpoints):
            print_json(each)
        return
    if found is not None:
        _print_served(found)
    if checkpoints:
        _print_checkpoints(checkpoints)
    elif look:
        note("there are no checkpoints on this machine; sluice models pull HUB_ID fetches one.")


def _server(url: str, *, required: bool) -> tuple[list[dict[str, Any]] | None, list[dict[str, str]]]:
    """Return the models of a server and its workers; None, and none, if it does not answer and is not `required`."""
    try:
        return asyncio.run(_read(url))
    except CliError as error:
        if required:
            raise
        note(str(error), style="yellow")
        return None, []


def checkpoints_of(worker: Mapping[str, str]) -> list[str] | None:
    """Return the hub ids and folders of the models that a worker has open; None for one of an earlier version."""
    try:
        found = json.loads(worker.get("checkpoints", ""))
    except (ValueError, RecursionError):
        return None
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else None


def _print_checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        "Checkpoints on this machine",
        {"checkpoint": "left", "size": "right", "family": "left", "served": "left"},
        [
            (
                each["checkpoint"],
                f"{each['bytes'] / 1e9:,.1f} GB" if each["bytes"] >= 1e8 else f"{each['bytes'] / 1e6:,.1f} MB",
                each["family"] or "",
                _served(each),
            )
            for each in checkpoints
        ],
    )


def _served(checkpoint: Mapping[str, Any]) -> str:
    if checkpoint["workers"]:
        return f"by {', '.join(checkpoint['workers'])}"
    return f"no: {checkpoint['problem']}" if checkpoint["problem"] else "not now"


def _print_served(found: Sequence[Mapping[str, Any]]) -> None:
    if found:
        print_table(
            "Models of the server",
            {"name": "left", "alias of": "left", "workers": "right", "rows / max": "right", "images": "left"},
            [
                (
                    each["name"],
                    each["model"] or "",
                    str(each["workers"] or "none"),
                    f"{each['rows']} / {each['max_rows']}",
                    "yes" if each["images"] else "no",
                )
                for each in found
            ],
        )
    else:
        note("no worker is alive on this server, and there are no aliases.")


async def _read(url: str) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    async with connected(url) as client:
        workers, aliases = await client.workers(), await client.aliases()
    serving = [each for each in workers if "model" in each and serves(each)]
    names = {**aliases, **{each["model"]: each["model"] for each in serving}}
    return [_described(name, model, serving) for name, model in sorted(names.items())], workers


def _described(name: str, model: str, workers: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    serving = [each for each in workers if each["model"] == model]
    rows, most = (sum(_whole(each.get(field)) for each in serving) for field in ("rows", "max_rows"))
    return {
        "name": name,
        "model": model if model != name else None,
        "workers": len(serving),
        "rows": rows,
        "max_rows": most,
        "images": bool(serving) and all(each.get("images") == "yes" for each in serving),
    }


def _whole(text: str | None) -> int:
    """Return the number; 0 for anything else, since any client of the server can write these fields."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else 0


@models.command()
def alias(
    name: Annotated[str, typer.Argument(help="The name that jobs are sent to.", metavar="NAME")],
    model: Annotated[
        str | None, typer.Argument(help="The model that takes them, as a worker serves it.", metavar="MODEL")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also for a model that no worker serves yet.")] = False,
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Let a name stand for a model, or move it to another.

    A job that is sent to an alias runs on the model that it names at that moment; jobs that wait keep theirs. So a
    model is replaced without a pause: start workers of the new one, move the alias, and drain the workers of the old
    one when its queue is empty. Answers name the model that gave them. An alias of a name that live workers serve, and
    one of another alias, is refused. Exit codes: 0, or 2 if it is refused.

    \b
    Examples:
      sluice models alias fast qwen-4b
      sluice models alias fast qwen-8b     # moves it
      sluice models alias fast --remove
    """
    if (model is None) != remove:
        problem = "give a model or --remove, not both" if remove else "give the model that it stands for, or --remove"
        raise CliError(f"{name}: {problem}. See: sluice models alias -h")
    before = asyncio.run(_set_alias(redis_url, name, model, force=force))
    if model is None:
        note(f"{name} is no alias any more; it stood for {before}" if before else f"{name} was no alias")
    else:
        note(f"{name} stands for {model} from now on" + (f"; before: {before}" if before not in (None, model) else ""))


async def _set_alias(url: str, name: str, model: str | None, *, force: bool) -> str | None:
    async with connected(url) as client:
        try:
            before = await client.set_alias(name, model, served_only=not force)
        except ValueError as error:
            raise CliError(_remedied(str(error))) from None
        if before not in (None, model):
            await _note_left(client, before)
        return before


async def _note_left(client: Client, model: str) -> None:
    """Print how many jobs are left for the model that an alias stood for."""
    if left := sum([await client.queued(model, lane) for lane in LANES]):
        note(f"{counted(left, 'job')} of {model} {'is' if left == 1 else 'are'} still queued or running there")


def _remedied(problem: str) -> str:
    forced = " --force sets the alias all the same." if problem.startswith("no live worker") else ""
    return sentence(problem) + forced
