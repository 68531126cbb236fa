"""`sluice worker`: runs `python -m worker`, with a few settings as options, or the supervisor of several models."""

import os
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.errors import CliError, worker_missing
from sluice.cli.options import (
    Checkpoints,
    ServedName,
    UntilStdinCloses,
    integer,
    named_checkpoints,
    split_name,
    stop_when_stdin_closes,
)

if TYPE_CHECKING:
    from worker.engine.model.load import OnLoaded


def worker(
    context: typer.Context,
    model: Checkpoints = None,
    name: ServedName = None,
    redis_url: Annotated[
        str | None, typer.Option(metavar="URL", help="SLUICE_REDIS_URL: URL of the Redis server.")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(parser=integer(), metavar="N", help="SLUICE_MAX_ROWS: jobs at once.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A TOML file of several models, each with settings of its own."),
    ] = None,
    until_stdin_closes: UntilStdinCloses = False,
) -> None:
    """Serve models of chats or embeddings until Ctrl-C.

    Each setting is a variable SLUICE_..., read from the environment or from .env in this folder; an option overrides
    both. .env.example in the repository lists all settings, with units and defaults. Several models share
    SLUICE_MEMORY_GB: each is loaded when jobs ask for it, in a process of its own, and leaves after
    SLUICE_IDLE_UNLOAD_S without one; so does a single one, if that is set.

    \b
    Examples:
      sluice worker --model mlx-community/Qwen3-4B-4bit --max-rows 8
      sluice worker --model small=mlx-community/Qwen3-4B-4bit --model mlx-community/Qwen3-32B-4bit
      sluice worker --config workers.toml
    """
    if until_stdin_closes:
        stop_when_stdin_closes()
    models = model or []
    if context.args:
        raise CliError(_argument_error(context.args, models))
    given: dict[str, Any] = {"redis_url": redis_url, "max_rows": max_rows}
    settings = {key: value for key, value in given.items() if value is not None}
    if config is not None:
        if models or name is not None:
            raise CliError("--config: it names the models; leave out --model and --name.")
        _supervise({**_read(config), **settings}, f"--config {config}: ")
    elif len(models) > 1:
        named = [{"name": name, "path": path} for name, path in named_checkpoints(models, name)]
        _supervise({**settings, "model": named}, "")
    else:
        _serve({**settings, **_one_model(models, name)}, _tell_loaded() if until_stdin_closes else None)


def _one_model(models: list[str], name: str | None) -> dict[str, str]:
    """Return the settings of the one model that is given, if any."""
    own_name, checkpoint = split_name(models[0]) if models else (None, None)
    if own_name and name not in (None, own_name):
        raise CliError(f"--name {name}: --model names it {own_name!r} already; leave one of them out.")
    given = {"model": checkpoint, "model_name": name or own_name}
    return {key: value for key, value in given.items() if value is not None}


def _argument_error(args: list[str], models: list[str]) -> str:
    """Return a message about arguments that belong to no option."""
    if not models and not args[0].startswith("-"):
        return f"{args[0]}: the model must be given with an option. Write: sluice worker --model {args[0]}"
    return f"{' '.join(args)}: unknown argument. See: sluice worker --help"


def _read(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text("utf-8"))
    except OSError as error:
        raise CliError(f"--config {config}: {error.strerror}; give a file that can be read.") from None
    except ValueError as error:  # of TOML, or of UTF-8
        raise CliError(f"--config {config}: it is not TOML: {error}.") from None


def _tell_loaded() -> "OnLoaded":
    """Return a function that tells a supervisor, whose socket stdin is, how many bytes of the weights are loaded."""
    all_parts = 0

    def tell(nbytes: int) -> None:
        nonlocal all_parts
        all_parts += nbytes
        with suppress(OSError):  # the supervisor has ended
            os.write(0, b"%d\n" % all_parts)

    return tell


def _supervise(config: dict[str, Any], place: str) -> None:
    try:
        from worker.errors import CannotStart
        from worker.supervisor.supervisor import plan_models, run_supervisor

        try:
            code = run_supervisor(plan_models(config))
        except CannotStart as error:
            raise CliError(f"{place}{error}") from None
    except ModuleNotFoundError as missing:
        raise worker_missing(missing) from None
    if code:
        raise typer.Exit(code)


def _serve(settings: dict[str, object], on_loaded: "OnLoaded | None") -> None:
    try:
        from worker.app import run_worker
        from worker.errors import CannotStart
        from worker.settings import read_settings

        try:
            found = read_settings(**settings)
            if found.idle_unload_s is None or on_loaded is not None:
                return run_worker(found, on_loaded)
        except CannotStart as error:
            raise CliError(str(error)) from None
    except ModuleNotFoundError as missing:  # the worker imports most of its packages when it runs
        raise worker_missing(missing) from None
    common = {key: value for key, value in settings.items() if key not in ("model", "model_name")}
    return _supervise({**common, "model": [{"name": found.model_name, "path": found.model}]}, "")
