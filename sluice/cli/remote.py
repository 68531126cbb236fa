"""Connects a command to a gateway over HTTP, in place of a Redis server."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sluice.cli.errors import CliError, connected, sentence
from sluice.cli.options import Remote
from sluice.client import Client
from sluice.contract.batch import Batch

if TYPE_CHECKING:  # it imports httpx, which takes longer than the rest of the command
    from sluice.batch.remote import RemoteBatches


@asynccontextmanager
async def _connected(server: Remote, *, patience_s: float = 30.0) -> AsyncIterator["RemoteBatches"]:
    """Yield the offline runs of a server. Its errors inside the block become `CliError`."""
    try:
        from sluice.batch.remote import RemoteBatches, RemoteError
    except ImportError as missing:
        raise CliError(f"--url needs httpx ({missing}): pip install 'httpx>=0.27'") from None
    try:
        batches = RemoteBatches(server.url, server.key, patience_s=patience_s)
    except ValueError as error:
        raise CliError(f"--url: {sentence(str(error))}") from None
    try:
        async with batches:
            yield batches
    except RemoteError as error:
        remedy = " Give the key with --key, or in SLUICE_API_KEY." if error.status == 401 else ""
        raise CliError(f"{sentence(str(error))}{remedy}") from None


@asynccontextmanager
async def offline_runs(server: str | Remote) -> AsyncIterator["Client | RemoteBatches"]:
    """Yield the offline runs of either kind of server. Their errors inside the block become `CliError`."""
    if isinstance(server, Remote):
        async with _connected(server) as runs:
            yield runs
    else:
        async with connected(server) as client:
            yield client


async def run_there(server: Remote, input: Path, output: Path, options: dict[str, Any]) -> Batch:
    """Run a file to its end, as `run_remote`; an outage is waited out."""
    async with _connected(server, patience_s=math.inf) as runs:
        from sluice.batch.remote_run import run_remote

        return await run_remote(runs, input, output, **options)


async def submit_there(server: Remote, input: Path, options: dict[str, Any]) -> Batch:
    """Upload a file and start its run, as `submit_remote`."""
    async with _connected(server) as runs:
        from sluice.batch.remote_run import submit_remote

        return await submit_remote(runs, input, **options)


async def download(server: Remote, file_id: str, into: BinaryIO) -> None:
    """Write the content of a file of the server."""
    async with _connected(server) as runs:
        await runs.download(file_id, into)
