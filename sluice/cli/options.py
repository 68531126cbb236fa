"""Options that several commands share."""

import math
import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path
from time import sleep
from typing import Annotated, Any, TypeVar

import typer

from sluice.batch.source import parse_window
from sluice.cli.errors import CliError
from sluice.contract.keys import LANES, Lane, is_model_name
from sluice.contract.redis_url import MapFile

N = TypeVar("N", int, float)


def integer(minimum: int | None = None, maximum: int | None = None) -> Callable[[str | int], int]:
    """Return a parser of whole numbers within these bounds."""

    def read(value: str | int) -> int:
        try:
            return _within(int(value), minimum, maximum)
        except ValueError:
            raise typer.BadParameter(f"it must be a whole number, not {str(value)!r}.") from None

    return read


def number(minimum: float | None = None) -> Callable[[str | float], float]:
    """Return a parser of numbers that are at least `minimum`."""

    def read(value: str | float) -> float:
        try:
            return _within(float(value), minimum, None)
        except ValueError:
            raise typer.BadParameter(f"it must be a number, not {str(value)!r}.") from None

    return read


def moment(value: str | float) -> float:
    """Return the Unix seconds of a duration from now, the next local HH:MM, or an ISO date and time. Raises
    typer.BadParameter."""
    text, now = str(value), datetime.now()
    try:
        if re.fullmatch(r"\d+[smhd]", text, re.ASCII):
            return now.timestamp() + parse_window(text)
        if re.fullmatch(r"\d\d:\d\d", text, re.ASCII):
            next_at = datetime.combine(now, time.fromisoformat(text))
            return (next_at if next_at > now else next_at + timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise typer.BadParameter(f"it must be like 22:00, 90m or 2026-12-24T22:00, not {text!r}.") from None


def lane(value: str) -> Lane:
    """Parse a lane. Raises typer.BadParameter."""
    if value not in LANES:
        raise typer.BadParameter(f"it must be {' or '.join(LANES)}, not {value!r}.")
    return value


def _within(value: N, minimum: N | None, maximum: N | None) -> N:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    if minimum is not None and value < minimum:
        raise typer.BadParameter(f"it must be at least {minimum}, not {value}.")
    if maximum is not None and value > maximum:
        raise typer.BadParameter(f"it must be at most {maximum}, not {value}.")
    return value


def _server(context: typer.Context, url: str) -> str:
    """Return the map of servers if the environment names one, unless an option gives a URL."""
    file = os.environ.get("SLUICE_REDIS_URLS")
    return MapFile(file) if file and not is_given(context, "redis_url") else url


@dataclass(frozen=True, slots=True)
class Remote:
    """A gateway, or another server with OpenAI's Files and Batches, in place of a Redis server."""

    url: str
    key: str | None


def server_of(context: typer.Context, redis_url: str, url: str | None, key: str | None) -> str | Remote:
    """Return the server of a command that takes both kinds. An option overrides the other kind's variable. Raises
    `CliError` if neither is preferred."""
    if url is None:
        return redis_url
    is_option = {name: is_given(context, name) for name in ("url", "redis_url")}
    if is_option["url"] == is_option["redis_url"] and (is_option["url"] or _is_redis_set()):
        both = "--url and --redis-url" if is_option["url"] else "SLUICE_URL and the variable of a Redis server"
        raise CliError(
            f"{both} exclude one another: give --url for a gateway over HTTP, or --redis-url if this machine reaches "
            "the Redis server itself."
        )
    return redis_url if is_option["redis_url"] else Remote(url, key)


def is_given(context: typer.Context, name: str) -> bool:
    """Return True if the parameter is an option of the command line, and not a variable or a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _is_redis_set() -> bool:
    return any(os.environ.get(name) for name in ("SLUICE_REDIS_URL", "SLUICE_REDIS_URLS"))


def named_checkpoints(models: list[str], name: str | None) -> list[tuple[str, str]]:
    """Return the name and the checkpoint of each of several models: `small=C`, or a checkpoint whose last part is the
    name. Raises `CliError`."""
    if name is not None:
        raise CliError(
            "--name: there are several models; write each name before its model, as in --model small=FOLDER."
        )
    named = [split_name(each) for each in models]
    found = [(name or Path(checkpoint).name, checkpoint) for name, checkpoint in named]
    for name, checkpoint in found:
        if not is_model_name(name):
            raise CliError(f"--model {checkpoint}: {name!r} cannot be its name; write one before it: NAME={checkpoint}")
    return found


def split_name(model: str) -> tuple[str | None, str]:
    """Return the name and the checkpoint of `small=C`; no name if there is none, or a folder is called so."""
    name, equals, checkpoint = model.partition("=")
    is_named = equals and checkpoint and is_model_name(name) and not Path(model).expanduser().exists()
    return (name, checkpoint) if is_named else (None, model)


RedisUrl = Annotated[
    str,
    typer.Option(
        "--redis-url",
        metavar="URL",
        envvar="SLUICE_REDIS_URL",
        help="URL of the Redis server. Overrides SLUICE_REDIS_URLS, the map of several.",
        callback=_server,
    ),
]
GatewayUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="SLUICE_URL",
        help="URL of a gateway (`sluice serve`), or of another server with OpenAI's Files and Batches, in place of "
        "--redis-url: for machines that do not reach the Redis server or its files.",
    ),
]
ApiKey = Annotated[
    str | None, typer.Option("--key", metavar="KEY", envvar="SLUICE_API_KEY", help="The API key for --url.")
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        envvar="SLUICE_MODEL_NAME",
        help="The name that the model is served under.  [default: default]",
    ),
]
Checkpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="[NAME=]FOLDER_OR_HUB_ID",
        help="SLUICE_MODEL: a folder or hub id that mlx_lm.load can open. Several models share this machine's memory.",
    ),
]
ServedName = Annotated[
    str | None, typer.Option(metavar="NAME", help="SLUICE_MODEL_NAME: the name that jobs use for it.")
]
LaneChoice = Annotated[
    Lane | None,
    typer.Option(
        "--lane",
        parser=lane,
        metavar="[interactive|batch]",
        help="`batch` is for offline work, which waits for interactive jobs.  [default: interactive, or batch for a "
        "request whose service_tier is flex]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, one object per line; all else on stderr.")]

REDIS_URL = "redis://localhost:6379/0"


Retry = Annotated[
    str | None,
    typer.Option(
        "--retry", metavar="KINDS", help="Run such lines again: invalid,cut,failed,refused, or some of these."
    ),
]
Retries = Annotated[
    int | None,
    typer.Option("--retries", parser=integer(1), metavar="N", help="At most so many times each.  [default: 2]"),
]


def retry_options(retry: str | None, retries: int | None) -> dict[str, Any]:
    """Return the options of `Client.batch`. Raises `CliError`."""
    if retry is None:
        if retries is not None:
            raise CliError("--retries: it says how often lines of --retry are run again; give --retry, too.")
        return {}
    kinds = [kind.strip() for kind in retry.split(",")]
    return {"retry": dict.fromkeys(kinds, 2 if retries is None else retries)}


UntilStdinCloses = Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)]


def stop_when_stdin_closes() -> None:
    """Stop this process, as SIGTERM does, when stdin closes: the process that started it has ended, or was killed. The
    signal is repeated, so running jobs are requeued and not waited for."""
    threading.Thread(target=_wait_and_stop, daemon=True).start()


def _wait_and_stop() -> None:
    with suppress(OSError):  # of a socket whose other end had more to read
        while os.read(0, 1):
            pass
    while True:
        os.kill(os.getpid(), signal.SIGTERM)
        sleep(1.0)
