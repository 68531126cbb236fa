"""Drives programs through their checks."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.support.conformance.environments import NotInstalled
from tests.support.conformance.programs.checks import CHECKS, Failed, NotApplicable, Run, Sizes
from tests.support.conformance.programs.installed import Installed, install
from tests.support.conformance.programs.programs import Fault, Program
from tests.support.conformance.programs.sandbox import leave_network, try_to_leave_network
from tests.support.conformance.programs.stage import Stage
from tests.support.conformance.programs.table import Cell, Failure, Missing, OwnFault, Passed, Row


def drive(
    programs: Sequence[Program], checks: Sequence[str], folder: Path, sizes: Sizes, console: Console, kept: Path | None
) -> list[Row]:
    """Install the programs, leave the network, and return the rows of the table. `kept`: a folder for what was sent and
    received. Raises `NoSandbox`."""
    try_to_leave_network()  # before minutes of installing
    rows = {program.name: Row(program.name) for program in programs}
    installed = list[Installed]()
    for program in programs:
        try:
            installed.append(install(program, folder, console))
        except NotInstalled as error:
            rows[program.name].problem = f"not installed: {error}"
    leave_network()
    with Stage() as stage:
        for found in installed:
            row = rows[found.program.name]
            row.version = found.version
            for name in checks:
                with console.status(f"{row.program}: {name} ..."):
                    row.cells[name] = _cell(found, name, stage, sizes, kept)
                console.print(
                    f"[dim]{row.program} {name}: {type(row.cells[name]).__name__.lower()}[/]", highlight=False
                )
    return list(rows.values())


def _cell(found: Installed, name: str, stage: Stage, sizes: Sizes, kept: Path | None) -> Cell:
    stage.recorder.take()
    with found.home(stage.url) as home:
        run = Run(found, stage, home, sizes, read=len(stage.played()))
        try:
            CHECKS[name](run)
            return Passed()
        except NotApplicable:
            return Missing()
        except Failed as failed:
            return _failed(failed.reason, found.program.faults.get(name))
        finally:
            run.refusals()
            if kept:
                _keep(run, kept / found.program.name / name)


def _failed(reason: str, known: Fault | None) -> Cell:
    return OwnFault(known.why) if known and known.sign in reason else Failure(reason)


def _keep(run: Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, connection in enumerate(run.connections):
        (folder / f"{number}.sent").write_bytes(connection.sent)
        (folder / f"{number}.received").write_bytes(connection.received)
    for printed in (*run.home.folder.glob("output-*"), *run.home.folder.glob("errors-*")):
        shutil.copy(printed, folder)
