"""Options that several commands share."""

from typing import Annotated

import typer

from sluice.cli import option_values
from sluice.wire import Lane

RedisUrl = Annotated[
    str, typer.Option("--redis-url", metavar="URL", envvar="SLUICE_REDIS_URL", help="The server that holds the queue.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", envvar="SLUICE_MODEL_NAME", help="The name a model is served by.  [default: default]"
    ),
]
LaneChoice = Annotated[
    Lane | None,
    typer.Option(
        "--lane",
        parser=option_values.lane,
        metavar="[interactive|batch]",
        help="Offline work goes into `batch`, behind the interactive.  [default: interactive, or batch for a request "
        "whose service_tier is flex]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, one object a line; all else on stderr.")]

REDIS_URL = "redis://localhost:6379/0"
MODEL = "default"
