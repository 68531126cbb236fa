"""Commands of the worker's distribution. They are entry points of it, since nothing here imports the worker."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import typer

from sluice.cli.errors import worker_missing

_GROUP = "sluice.commands"
_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def add(app: typer.Typer, name: str, *, takes_any_arguments: bool = False) -> None:
    """Add the command or the group of an entry point: `batch.schedule` is `schedule` of `batch`. Without the worker it
    says what to install."""
    command = _load(name)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
        return
    settings = _ANY_ARGUMENTS if command.__module__ == __name__ else {"allow_extra_args": takes_any_arguments}
    app.command(name.rpartition(".")[2], context_settings=settings)(command)


def add_callback(group: typer.Typer, name: str) -> None:
    """Let a group without a command of it run an entry point, which receives the context."""
    group.callback(invoke_without_command=True)(_load(name))


def optional(name: str) -> Callable[..., Any] | None:
    """Return what an entry point of the worker names; None where the worker, or a package of its, is not installed."""
    found: Callable[..., Any] = _load(name)
    return None if found.__module__ == __name__ else found


def _load(name: str) -> Any:
    try:
        for entry_point in entry_points(group=_GROUP, name=name):
            return entry_point.load()
    except ImportError as error:
        return _missing(error)
    return _missing(None)


def _missing(error: ImportError | None) -> Callable[[typer.Context], None]:
    def missing(context: typer.Context) -> None:
        """Needs the worker, which is not installed here."""
        if context.invoked_subcommand is None:
            raise worker_missing(error)

    return missing
