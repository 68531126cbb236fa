"""`sluice models`: what can be served on a server, and under which names."""

import asyncio
import json
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from sluice.cli import worker_commands
from sluice.cli.commands.workers import NoWait, Timeout
from sluice.cli.errors import CliError, connected, sentence
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.output import print_json, print_table
from sluice.cli.terminal.view import note
from sluice.client import Client
from sluice.contract.keys import LANES
from sluice.contract.models import Model, State, loaded_share
from sluice.presence import serves
from sluice.wording import counted

models = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@models.callback()
def _about() -> None:
    """List models here and served; load, fetch or remove them.

    \b
    Examples:
      sluice models list
      sluice models pull mlx-community/Qwen3-4B-4bit
      sluice models load qwen-4b
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
    """List the server's models and aliases, and the checkpoints here.

    A model that a supervisor of several has is loaded when a job comes, and listed with its state.

    Checkpoints are those in the cache of Hugging Face, and folders that the settings or workers of this machine name,
    with their sizes on disk. Each is checked as by `sluice check`, which takes a second or a few: `served` is the
    workers here that have it, or why this version would not serve it. Without a worker installed here, and without a
    server, the other part is listed.

    With --json, print an object for each name: `model` is what an alias stands for, else null; `workers` counts those
    that take jobs; `supervisors` has the state, the share of memory, the weights, of them the bytes that a load has
    read, and the problem of each that has it. Those of checkpoints have `checkpoint` in place of `name`. Exit codes: 0,
    or 2 if there is neither a server nor a worker installed here.

    \b
    Examples:
      sluice models list
      sluice models list --served --json | jq -r 'select(.workers > 0).name'
      sluice models list --json | jq -r 'select(.servable == false) | .checkpoint, .problem'
    """
    look = None if served else worker_commands.optional("models.checkpoints")
    server = _server(redis_url, required=look is None)
    found = server.models if server else None
    here = [each for each in server.workers if each.get("host") == socket.gethostname()] if server else []
    opened = {path for each in here for path in checkpoints_of(each) or ()}
    opened |= server.paths_here() if server else set()
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


@dataclass(frozen=True, slots=True)
class _Server:
    """What a server knows of models: those of its workers, of its supervisors, and aliases."""

    workers: Sequence[Mapping[str, str]]
    supervisors: Mapping[str, Mapping[str, Model]]
    aliases: Mapping[str, str]

    @property
    def models(self) -> list[dict[str, Any]]:
        """Each name with what it stands for and who serves it, sorted."""
        served = {each["model"] for each in self.workers if "model" in each and serves(each)}
        served |= {name for each in self.supervisors.values() for name in each}
        names = {**self.aliases, **{name: name for name in served}}
        return [self._described(name, model) for name, model in sorted(names.items())]

    def _described(self, name: str, model: str) -> dict[str, Any]:
        serving = [each for each in self.workers if each.get("model") == model and serves(each)]
        rows, most = (sum(_whole(each.get(field)) for each in serving) for field in ("rows", "max_rows"))
        having = {id: models[model] for id, models in self.supervisors.items() if model in models}
        return {
            "name": name,
            "model": model if model != name else None,
            "workers": len(serving),
            "rows": rows,
            "max_rows": most,
            "images": bool(serving) and all(each.get("images") == "yes" for each in serving),
            "supervisors": [{"id": id, **each} for id, each in having.items()],
        }

    def paths_here(self) -> set[str]:
        """Return what the supervisors of this machine may load: folders and hub ids."""
        here = (models for id, models in self.supervisors.items() if is_here(id))
        return {each["path"] for models in here for each in models.values()}


def is_here(supervisor: str) -> bool:
    """Return True for the id of a supervisor on this machine: the name of its host and its process."""
    return supervisor.rpartition("-")[0] == socket.gethostname()


def _server(url: str, *, required: bool) -> _Server | None:
    """Return what a server knows; None if it does not answer and is not `required`."""
    try:
        return asyncio.run(_read(url))
    except CliError as error:
        if required:
            raise
        note(str(error), style="yellow")
        return None


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
            {
                "name": "left",
                "alias of": "left",
                "state": "left",
                "memory": "right",
                "workers": "right",
                "rows / max": "right",
                "images": "left",
            },
            [
                (
                    each["name"],
                    each["model"] or "",
                    _state(each),
                    _memory(each),
                    str(each["workers"]),
                    f"{each['rows']} / {each['max_rows']}",
                    "yes" if each["images"] else "no",
                )
                for each in found
            ],
        )
    else:
        note("no worker is alive on this server, and it has no aliases.")


def _state(model: Mapping[str, Any]) -> str:
    """Return the state of a model, and since when, as the supervisor says that has come furthest with it."""
    if model["workers"]:
        return "loaded"
    order = "loaded", "loading", "unloading", "unloaded"
    known = sorted(model["supervisors"], key=lambda each: (order.index(each["state"]), -loaded_share(each)))
    if not known:
        return "no worker"
    share = f", {loaded_share(known[0]):.0%}" if known[0]["state"] == "loading" else ""
    problem = f": {known[0]['problem']}" if known[0]["problem"] else ""
    return f"{known[0]['state']}{share}{problem}"


def _memory(model: Mapping[str, Any]) -> str:
    nbytes = sum(each["bytes"] for each in model["supervisors"] if each["state"] != "unloaded")
    return f"{nbytes / 1e9:,.1f} GB" if nbytes else ""


async def _read(url: str) -> _Server:
    async with connected(url) as client:
        return _Server(await client.workers(), await client.supervised_models(), await client.aliases())


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


_Name = Annotated[str, typer.Argument(help="A model, as `sluice models list` names it.", metavar="NAME")]


@models.command()
def load(name: _Name, no_wait: NoWait = False, timeout_s: Timeout = 600.0, redis_url: RedisUrl = REDIS_URL) -> None:
    """Load a model of a supervisor before a job asks for it.

    It leaves again after SLUICE_IDLE_UNLOAD_S, or if another needs its room, as after a job. If there is no room, idle
    models leave, the least recently used first. All supervisors of the server that have the model are asked. Shows what
    happens until it is loaded. Exit codes: 0, 1 if it cannot be loaded or nothing changes for --timeout, 2 if no
    supervisor has it.

    \b
    Example:
      sluice models load small
    """
    asyncio.run(_ask(redis_url, name, "load", None if no_wait else timeout_s))


@models.command()
def unload(name: _Name, no_wait: NoWait = False, timeout_s: Timeout = 600.0, redis_url: RedisUrl = REDIS_URL) -> None:
    """Free the memory of a model that a supervisor of several has.

    Its worker ends its jobs first; what still runs after SLUICE_GRACE_S continues when the model is loaded again, and
    the next job loads it, at once if one waits. Shows what happens until it is unloaded. Exit codes: 0, 1 if it is
    loaded again for jobs that wait, or nothing changes for --timeout, 2 if no supervisor has it.

    \b
    Example:
      sluice models unload small
    """
    asyncio.run(_ask(redis_url, name, "unload", None if no_wait else timeout_s))


async def _ask(url: str, name: str, what: Literal["load", "unload"], timeout_s: float | None) -> None:
    async with connected(url) as client:
        model = (await client.aliases()).get(name, name)
        found = await client.supervised_models()
        having = {id: models[model] for id, models in found.items() if model in models}
        if not having:
            raise CliError(_why_not_asked(name, {each for models in found.values() for each in models}))
        goal: State = "loaded" if what == "load" else "unloaded"
        for id in (id for id, each in having.items() if each["state"] != goal):
            await client.ask_supervisor(id, what, model)
        if timeout_s is not None:
            await _follow(client, model, having, goal, timeout_s)


def _why_not_asked(name: str, known: Collection[str]) -> str:
    if known:
        return f"no supervisor has a model {name!r}; those that can be loaded are {', '.join(sorted(known))}."
    return (
        "no supervisor of several models is alive on this server. One is started by more than one --model: sluice up "
        "--model A --model small=B. What else is served has a worker of its own, which sluice workers lists."
    )


async def _follow(client: Client, model: str, asked: Mapping[str, Model], goal: State, timeout_s: float) -> None:
    """Print the states of a model, a line for each change, until all supervisors have reached the goal. `asked`: the
    model as each had it then. Raises `CliError`."""
    shown, loaded = dict[str, str](), dict[str, int]()
    changed_at = time.monotonic()
    while True:
        found = await client.supervised_models()
        now = {id: found[id][model] for id in sorted(asked) if model in found.get(id, {})}
        for id, each in now.items():
            if each["problem"] and each["state"] == "unloaded" and each["since"] != asked[id]["since"]:
                raise CliError(f"{id}: {model}: {each['problem']}; its log says why.", exit_code=1)
            if goal == "unloaded" and _is_back(each["state"], shown.get(id)):
                remedy = f"sluice queue purge {model} cancels them"
                raise CliError(
                    f"{id}: {model} has left, and is loaded again for jobs that wait; {remedy}.", exit_code=1
                )
            if each["state"] != shown.get(id):
                note(f"{id}: {model} is {each['state']}" + _waiting(each["state"], goal))
                shown[id] = each["state"]
                changed_at = time.monotonic()
            if each["loaded_bytes"] != loaded.get(id, 0):
                loaded[id] = each["loaded_bytes"]
                changed_at = time.monotonic()
        if missing := [id for id in asked if id not in now]:
            raise CliError(f"{missing[0]} has left.", exit_code=1)
        if all(each["state"] == goal for each in now.values()):
            return
        if time.monotonic() - changed_at > timeout_s:
            raise CliError(f"nothing has changed for {timeout_s:g} s.", exit_code=1)
        await asyncio.sleep(0.2)


def _is_back(state: State, before: str | None) -> bool:
    """Return True if a model that is loaded or loading has left since it was in the state `before`, the last seen."""
    return (state, before) == ("loading", "loaded") or (
        state in ("loading", "loaded") and before in ("unloading", "unloaded")
    )


def _waiting(state: State, goal: State) -> str:
    return ", and waits for memory or its turn" if (state, goal) == ("unloaded", "loaded") else ""
