"""`sluice up`: a server and a worker on this machine, started and ended together."""

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.embedded_server import EmbeddedServer, default_folder
from sluice.client import Client
from sluice.errors import SluiceError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.2  # between two looks whether the worker serves
_HURRY_S = 1.0  # between two signals to a worker that has lost its server
_EXIT_SERVER_ENDED = 1


def up(
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER_OR_HUB_ID", help="SLUICE_MODEL: what mlx_lm.load opens.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="SLUICE_MODEL_NAME: the name that jobs ask for.")
    ] = None,
    max_rows: Annotated[int | None, typer.Option(metavar="N", help="SLUICE_MAX_ROWS: jobs at once.")] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            metavar="PORT",
            help="Where the server listens.  [default: 6379, or a free one]",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where the server keeps jobs and results; they are there again at the next start.  "
            "[default: a folder of this user, which is printed]",
        ),
    ] = None,
) -> None:
    """Serve one model on this machine alone: start a server of its own and a worker, until Ctrl-C or SIGTERM.

    No Redis has to be there. What other terminals need to reach it is printed when the model is loaded. The worker
    reads its settings from SLUICE_... and .env, as `sluice worker` does, all but SLUICE_REDIS_URL.

    \b
    Example:
      sluice up --model mlx-community/Qwen3-4B-4bit
    """
    given = {"--model": model, "--name": name, "--max-rows": max_rows}
    options = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
    code = asyncio.run(_Up(EmbeddedServer((data or default_folder()).expanduser(), port), options).run())
    if code:
        raise typer.Exit(code)


class _Up:
    """The server comes first and goes last; signals are for the worker, which knows how to end."""

    def __init__(self, server: EmbeddedServer, options: list[str]) -> None:
        self._server, self._began = server, time.time()
        self._command = [sys.executable, "-m", "sluice.cli", "worker", *options, "--redis-url", server.url]
        self._worker: asyncio.subprocess.Process | None = None
        self._stopped = False

    async def run(self) -> int:
        """Return the exit status of the command. Raises `CliError`."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._pass_on, number)
        async with self._server:
            _say(f"server on port {self._server.port}, data in {self._server.folder}")
            if self._stopped:
                return 0
            # In a session of its own, or Ctrl-C would reach it twice: from the terminal, and from here.
            self._worker = await asyncio.create_subprocess_exec(
                *self._command, start_new_session=True, stdin=subprocess.DEVNULL
            )
            return await self._watch(self._worker)

    def _pass_on(self, number: int) -> None:
        self._stopped = True
        if self._worker is not None:
            with suppress(ProcessLookupError):
                self._worker.send_signal(number)

    async def _watch(self, worker: asyncio.subprocess.Process) -> int:
        """Return when both or the worker have ended."""
        announcing = asyncio.create_task(self._announce())
        working, serving = asyncio.create_task(worker.wait()), asyncio.create_task(self._server.wait())
        await asyncio.wait([working, serving], return_when=asyncio.FIRST_COMPLETED)
        ready = announcing.done()
        announcing.cancel()
        if not working.done():
            _say(f"the server has ended (exit code {serving.result()}); {self._server.log_file} may say why")
            await _end(worker, working)
            return _EXIT_SERVER_ENDED
        serving.cancel()
        if not self._stopped:
            _say(f"the worker has ended (exit code {working.result()})")
        elif not ready:
            return 0  # it was told to stop while it loaded its model, and held no job
        return working.result()

    async def _announce(self) -> None:
        """Say how to reach the worker, once it serves."""
        async with Client(self._server.url) as client:
            while True:
                with suppress(SluiceError):
                    for worker in await client.workers():
                        if float(worker["started_at"]) >= self._began:
                            return _invite(self._server.url, worker["model"])
                await asyncio.sleep(_LOOK_S)


async def _end(worker: asyncio.subprocess.Process, working: "asyncio.Task[int]") -> None:
    """At once: it cannot hand its jobs back, and finds them again at the next start."""
    while not working.done():
        with suppress(ProcessLookupError):
            worker.terminate()
        await asyncio.wait([working], timeout=_HURRY_S)


def _invite(url: str, model: str) -> None:
    command = "sluice" if shutil.which("sluice") or Path(sys.argv[0]).name != "sluice" else sys.argv[0]
    option = "" if model == "default" else f" --model {model}"
    _say(
        "ready. In another terminal:\n\n"
        f"  export SLUICE_REDIS_URL={url}\n"
        f'  {command} chat{option} "Count to 12."\n\n'
        "Ctrl-C here ends the worker, then the server. Jobs that wait are kept."
    )


def _say(sentence: str) -> None:
    print(f"sluice: {sentence}", file=sys.stderr, flush=True)
