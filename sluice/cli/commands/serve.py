"""`sluice serve`: the HTTP gateway."""

from typing import Annotated

import typer

from sluice.cli.errors import CliError, needs_gateway
from sluice.cli.options import REDIS_URL


def serve(
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="SLUICE_SERVE_HOST: address to listen on.  [default: 127.0.0.1]"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, metavar="PORT", help="SLUICE_SERVE_PORT: port to listen on.  [default: 8000]"),
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(metavar="URL", help="SLUICE_REDIS_URL: URL of the Redis server.")
    ] = None,
) -> None:
    """Serve the queue over HTTP, to OpenAI's and Anthropic's clients.

    It runs until Ctrl-C or SIGTERM. Any number of these processes may serve one queue. Each setting is a variable
    SLUICE_SERVE_..., read from the environment or from .env in this folder; an option overrides both. .env.example
    in the repository lists them.

    \b
    Example:
      sluice serve --port 8000 --redis-url redis://localhost:6379/0
    """
    given = {"host": host, "port": port}
    with needs_gateway():
        from sluice.gateway.server import run
        from sluice.gateway.settings import CannotServe, read_redis_url, read_settings
    try:
        settings = read_settings(**{name: value for name, value in given.items() if value is not None})
        run(redis_url or read_redis_url(REDIS_URL), settings)
    except CannotServe as error:
        raise CliError(str(error)) from None
