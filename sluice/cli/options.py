"""Options that several commands share."""

from typing import Annotated

import typer

from sluice.cli import option_values
from sluice.contract.keys import Lane

RedisUrl = Annotated[
    str, typer.Option("--redis-url", metavar="URL", envvar="SLUICE_REDIS_URL", help="URL of the Redis server.")
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
LaneChoice = Annotated[
    Lane | None,
    typer.Option(
        "--lane",
        parser=option_values.lane,
        metavar="[interactive|batch]",
        help="`batch` is for offline work, which waits for interactive jobs.  [default: interactive, or batch for a "
        "request whose service_tier is flex]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, one object per line; all else on stderr.")]

REDIS_URL = "redis://localhost:6379/0"
MODEL = "default"
