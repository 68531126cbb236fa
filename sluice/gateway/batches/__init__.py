"""OpenAI's Files and Batches, on the folder of runs that workers check."""

from collections.abc import Sequence

from starlette.routing import Route

from sluice.gateway.batches import files, runs
from sluice.gateway.batches.folder import Shared
from sluice.gateway.gateway import Gateway


def routes(gateway: Gateway) -> Sequence[Route]:
    """Return the routes of files and of batches."""
    shared = Shared(gateway.settings.batch_dir)
    return [*files.routes(gateway, shared), *runs.routes(gateway, shared)]


__all__ = ["routes"]
