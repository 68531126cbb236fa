"""scripts/conformance: drive the HTTP gateway with the programs and the clients that people use."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from rich.console import Console

from tests.support.conformance.catalog import CLIENTS, Client
from tests.support.conformance.environments import NotInstalled, environment, install
from tests.support.conformance.gateway import gateway
from tests.support.conformance.programs import table as cells
from tests.support.conformance.programs import tried
from tests.support.conformance.programs.checks import CHECKS, Sizes
from tests.support.conformance.programs.installed import FOLDER
from tests.support.conformance.programs.pages import PAGES
from tests.support.conformance.programs.programs import PROGRAMS, Program
from tests.support.conformance.programs.run import drive
from tests.support.conformance.programs.sandbox import NoSandbox
from tests.support.conformance.programs.selection import Unknown, select
from tests.support.conformance.programs.stage import Stage
from tests.support.conformance.results import Report, failures, read_report, table
from tests.support.stack import ROOT

_ABOUT = f"""\
Drive the HTTP gateway with the programs that people use, each with what its page in docs/clients has users paste, or
with SDKs (--client). Programs are installed in their newest release from npm or PyPI, each in a folder of its own,
which later runs use again: delete it for a newer release. Each runs in a home of its own, without keys, telemetry or
any network but loopback, against a real gateway and a real worker that answers by a script in the user's message.

programs: {", ".join(PROGRAMS)}
checks:
  start      a turn, without a request that is refused      session    many turns with tools: all prefixes are found
  turn       thoughts, a long answer, a second turn         overflow   beyond the context: shortened, or reported
  tools      one call, two at once                          cancel     the program is interrupted: its job ends
  mistakes   an unknown tool, broken arguments              worker     kill -9 of the worker in an answer
  images     a picture reaches the model                    gateway    kill -9 of the gateway in an answer
  silence    a first token that takes a while

Prints a table, and the reason of each failure; "client's own fault" names what no gateway can mend. The exit code is 1
if a check fails otherwise, or if a program cannot be installed, and 2 if this machine gives no network namespace."""
_EXAMPLES = """\
examples:
  scripts/conformance                                 the first checks of some programs; some minutes
  scripts/conformance --programs codex,opencode       all checks of these two
  scripts/conformance --programs all --turns 40       everything; about an hour
  scripts/conformance --programs codex --checks session --keep /tmp/kept    and keep what was sent and received
  scripts/conformance --programs claude-code --checks silence --silence 320    longer than its limit of five minutes
  scripts/conformance --programs all --write          and write docs/clients/README.md's table
  scripts/conformance --client openai --client ai-sdk      every call of these SDKs, without a sandbox
  scripts/conformance --client all                    all SDKs, llm-comply's suites, and schemathesis

A program is an entry in tests/support/conformance/programs/programs.py and a page in docs/clients. The checks of SDKs
are in tests/support/conformance/checks, one file for each; a check is a function with the name of its call. llm-comply
has the suites of Open Responses, OpenAI chat and Anthropic; schemathesis sends requests made from the gateway's
/openapi.json."""

_WIDTH = 160  # of a table that is written to a file
_ALL = "all"
_NO_SANDBOX = 2


def main() -> int:
    """Run the checks of the chosen programs or clients, and return 0 if all of them pass."""
    parser = _parser()
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    if options.client:
        return _drive_clients(options.client, options.folder, console)
    try:
        chosen, checks = select(options.programs, options.checks)
    except Unknown as error:
        parser.error(str(error))
    return _drive_programs([PROGRAMS[name] for name in chosen], checks, options, console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/conformance",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--programs", metavar="NAMES", help="which, with commas between; `all`: each of them")
    parser.add_argument("--checks", metavar="NAMES", help=f"of {', '.join(CHECKS)}; default: all with --programs")
    parser.add_argument("--turns", type=int, default=Sizes().turns, help=f"of a session; default: {Sizes().turns}")
    parser.add_argument(
        "--silence",
        type=float,
        default=Sizes().silent_s,
        metavar="SECONDS",
        help=f"before the first token, of the check `silence`; default: {Sizes().silent_s:g}",
    )
    parser.add_argument(
        "--write", action="store_true", help="the results into docs/clients: the table, and a line of each page"
    )
    parser.add_argument("--keep", type=Path, help="a folder to write what the programs sent and received to")
    parser.add_argument("--folder", type=Path, help=f"where programs and clients are installed; default: {FOLDER}")
    parser.add_argument(
        "--client",
        action="append",
        choices=[*CLIENTS, _ALL],
        metavar="NAME",
        help=f"an SDK in place of programs: {', '.join(CLIENTS)}, or all; repeatable. Installed anew without --folder",
    )
    return parser


def _drive_programs(
    chosen: Sequence[Program], checks: Sequence[str], options: argparse.Namespace, console: Console
) -> int:
    folder = (options.folder or FOLDER).resolve()
    try:
        rows = drive(chosen, checks, folder, Sizes(options.turns, options.silence), console, options.keep)
    except NoSandbox as error:
        console.print(f"scripts/conformance: {error}.", markup=False, highlight=False)
        return _NO_SANDBOX
    console.print(cells.table(rows))
    _print_lines(cells.reasons(rows), console)
    if options.write:
        tried.write(rows, PAGES, date.today())
    return 0 if all(row.passed for row in rows) else 1


def _drive_clients(names: Sequence[str], given: Path | None, console: Console) -> int:
    chosen = CLIENTS if _ALL in names else dict.fromkeys(names)
    reports = list[Report]()
    with _folder(given) as folder:
        for processes, played in ((gateway, False), (_stage, True)):
            clients = [CLIENTS[name] for name in chosen if CLIENTS[name].played == played]
            if clients:
                with processes() as url:
                    reports += [_report(client, folder, url, console) for client in clients]
    console.print(table(reports))
    _print_lines(failures(reports), console)
    return 0 if all(report.passed for report in reports) else 1


@contextmanager
def _stage() -> Iterator[str]:
    with Stage() as stage:
        yield stage.url


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given.resolve() / "sdks"  # some have the name of a program
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


def _print_lines(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
