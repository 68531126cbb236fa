"""`sluice models`: what can be served on a server, and under which names."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

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
    """List the models of a server; give them other names.

    \b
    Examples:
      sluice models list
      sluice models alias fast qwen-4b
    """


@models.command("list")
def list_models(redis_url: RedisUrl = REDIS_URL, as_json: AsJson = False) -> None:
    """List what workers serve, and the aliases.

    With --json, print an object for each name: `model` is what an alias stands for, else null; `workers` counts those
    that take jobs.

    \b
    Examples:
      sluice models list
      sluice models list --json | jq -r 'select(.workers > 0).name'
    """
    found = asyncio.run(_read(redis_url))
    if as_json:
        for each in found:
            print_json(each)
    elif found:
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


async def _read(url: str) -> list[dict[str, Any]]:
    async with connected(url) as client:
        workers = [each for each in await client.workers() if "model" in each and serves(each)]
        aliases = await client.aliases()
    served = {each["model"]: each["model"] for each in workers}
    return [_described(name, model, workers) for name, model in sorted({**aliases, **served}.items())]


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
