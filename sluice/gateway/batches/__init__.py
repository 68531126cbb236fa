"""OpenAI's Files, Uploads and Batches, and Anthropic's Message Batches, on the folder of runs that workers check."""

from collections.abc import Sequence

from starlette.routing import Route

from sluice.gateway.batches import files, messages, runs, uploads
from sluice.gateway.batches.folder import Shared
from sluice.gateway.gateway import Gateway


def routes(gateway: Gateway) -> Sequence[Route]:
    """Return the routes of files and uploads, of batches and of message batches."""
    shared = Shared(gateway.settings.batch_dir)
    own = runs.Runs(gateway, shared)
    return [
        *files.routes(gateway, shared),
        *uploads.routes(gateway, shared),
        *runs.routes(gateway, shared, own),
        *messages.routes(gateway, shared, own),
    ]


__all__ = ["routes"]
