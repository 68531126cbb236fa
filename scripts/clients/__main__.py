"""scripts/conformance: drive the HTTP gateway with the clients that people use."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from scripts.clients.catalog import CLIENTS, Client
from scripts.clients.environments import NotInstalled, environment, install
from scripts.clients.front import front
from scripts.clients.results import Report, failures, read_report, table
from scripts.stack import ROOT

_ABOUT = """\
Drive the HTTP gateway with the clients that people use, through every call that each of them has: answers, streams,
tools, JSON schemas, images, errors, and leaving in the middle. Each client is installed in its newest release from PyPI
or npm, in a folder of its own. A server, a worker with models/tiny-chat, one with a tiny random model that takes
images, and a gateway are started for the run.

Prints a table of calls and clients, and the reason of each failure. The exit code is 1 if a call fails, or if a client
cannot be installed."""
_EXAMPLES = """\
examples:
  scripts/conformance                                     all clients; some minutes, most of them for installing
  scripts/conformance --client openai --client ai-sdk     these two
  scripts/conformance --folder /tmp/clients               keep the installed clients there, and use them again

The checks are in scripts/clients/checks, one file for each client; a check is a function with the name of its call.
schemathesis sends requests made from the gateway's /openapi.json, valid ones and others, with any headers."""

_WIDTH = 160  # of a table that is written to a file


def main() -> int:
    """Run the checks of the chosen clients, and return 0 if all of them pass."""
    parser = argparse.ArgumentParser(
        prog="scripts/conformance",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--client", action="append", choices=CLIENTS, metavar="NAME", help=f"one of {', '.join(CLIENTS)}; repeatable"
    )
    parser.add_argument("--folder", type=Path, help="where to install the clients; default: a temporary folder")
    options = parser.parse_args()
    chosen = [CLIENTS[name] for name in dict.fromkeys(options.client or CLIENTS)]
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    with _folder(options.folder) as folder, front() as url:
        reports = [_report(client, folder, url, console) for client in chosen]
    return _print(reports, console)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="sluice-clients-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)


def _report(client: Client, folder: Path, url: str, console: Console) -> Report:
    console.print(f"[dim]{client.name}: installing {' '.join(client.packages)} ...[/]", highlight=False)
    try:
        command = install(client, folder)
    except NotInstalled as error:
        return Report(client.name, "-", {}, f"not installed: {error}")
    console.print(f"[dim]{client.name}: checking ...[/]", highlight=False)
    return check(client, command, url)


def check(client: Client, command: Sequence[str], url: str) -> Report:
    """Run the checks of an installed client against the gateway at `url`."""
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=environment(url), capture_output=True, text=True, timeout=client.runs_s
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if error.stdout else ""
        return read_report(client.name, printed.splitlines(), f"its checks did not end within {client.runs_s:g} s")
    problem = None if ran.returncode == 0 else f"its checks ended with {ran.returncode}: {ran.stderr[-1000:]}"
    return read_report(client.name, ran.stdout.splitlines(), problem)


def _print(reports: Sequence[Report], console: Console) -> int:
    console.print(table(reports))
    for line in failures(reports):
        console.print(line, markup=False, highlight=False)
    return 0 if all(report.passed for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
