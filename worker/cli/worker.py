"""`sluice worker`: runs `python -m worker`, with a few settings as options."""

from typing import Annotated

import typer

from sluice.cli.errors import CliError, worker_missing
from sluice.cli.options import Checkpoint, ServedName, integer


def worker(
    context: typer.Context,
    model: Checkpoint = None,
    name: ServedName = None,
    redis_url: Annotated[
        str | None, typer.Option(metavar="URL", help="SLUICE_REDIS_URL: URL of the Redis server.")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(parser=integer(), metavar="N", help="SLUICE_MAX_ROWS: jobs at once.")
    ] = None,
) -> None:
    """Serve one model until Ctrl-C or SIGTERM.

    Each setting is a variable SLUICE_..., read from the environment or from .env in this folder; an option overrides
    both. .env.example in the repository lists all settings, with units and defaults.

    \b
    Example:
      sluice worker --model mlx-community/Qwen3-4B-4bit --max-rows 8
    """
    if context.args:
        raise CliError(_argument_error(context.args, model))
    flags = {"model": model, "model_name": name, "redis_url": redis_url, "max_rows": max_rows}
    _serve({name: value for name, value in flags.items() if value is not None})


def _argument_error(args: list[str], model: str | None) -> str:
    """Return a message about arguments that belong to no option."""
    if model is None and not args[0].startswith("-"):
        return f"{args[0]}: the model must be given with an option. Write: sluice worker --model {args[0]}"
    return f"{' '.join(args)}: unknown argument. See: sluice worker --help"


def _serve(settings: dict[str, object]) -> None:
    try:
        from worker.app import run_worker
        from worker.errors import CannotStart
        from worker.settings import read_settings

        try:
            run_worker(read_settings(**settings))
        except CannotStart as error:
            raise CliError(str(error)) from None
    except ModuleNotFoundError as missing:  # the worker imports most of its packages when it runs
        raise worker_missing(missing) from None
