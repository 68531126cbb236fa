"""Installs programs by name, each into a folder of its own, and finds how they are called there."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tests.support.conformance.environments import NotInstalled, run_installer
from tests.support.conformance.programs.pages import PAGES, read_config
from tests.support.conformance.programs.programs import DRIVERS, NODE, Program, Turn
from tests.support.conformance.programs.sandbox import Home

FOLDER = Path("~/.cache/sluice/conformance").expanduser()
_NODE_MAJOR = 22  # that Qwen Code, Continue and Cline need


@dataclass(frozen=True, slots=True)
class Installed:
    """A program in its folder. `node`: the folder of Node's executable."""

    program: Program
    folder: Path
    node: Path
    version: str

    @property
    def path(self) -> str:
        """PATH of the program."""
        own = self.folder / ("bin" if self.program.python else "node_modules/.bin")
        return f"{own}:{self.node}:/usr/local/bin:/usr/bin:/bin"

    def home(self, url: str) -> Home:
        """Return a home with what the program's page has its readers paste, for a gateway at `url`."""
        config = read_config((PAGES / f"{self.program.page or self.program.name}.md").read_text("utf-8")).at(url)
        home = Home(self.path, {**config.environment, **self.program.quiet})
        config.write(home.folder)
        if not self.program.python:  # modules are found from the folder of the file that imports them
            (home.folder / "node_modules").symlink_to(self.folder / "node_modules")
        return home

    def command(self, turn: Turn, home: Path) -> list[str]:
        """Return the command of a turn."""
        first, *others = self.program.command(turn)
        if first.endswith(".py"):
            return [str(self.folder / "bin" / "python"), str(DRIVERS / first), *others]
        if first.endswith(".mjs"):
            shutil.copy(DRIVERS / first, home)
            return [str(self.node / "node"), str(home / first), *others]
        own = self.folder / ("bin" if self.program.python else "node_modules/.bin") / first
        return [str(own), *others]


def is_installed(program: Program, folder: Path) -> bool:
    """Return True if an earlier run has installed it."""
    return (_home(program, folder) / "installed").exists()


def install(program: Program, folder: Path, console: Console) -> Installed:
    """Install the newest release below `folder`, unless it is there. Raises `NotInstalled`."""
    home, node = _home(program, folder), _node(folder, console)
    if not is_installed(program, folder):
        with console.status(f"{program.name}: installing {' '.join(program.packages)} ..."):
            if program.python:
                run_installer([sys.executable, "-m", "venv", "--clear", str(home)])
                pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                run_installer([*pip, *program.packages])
            else:
                _npm(home, program.packages, node)
        (home / "installed").touch()
        console.print(f"[dim]{program.name}: installed in {home}[/]", highlight=False)
    return Installed(program, home, node, _version(program, home))


def _home(program: Program, folder: Path) -> Path:
    return folder / (program.page or program.name)


def _npm(home: Path, packages: Sequence[str], node: Path | None = None) -> None:
    """Install packages with npm. `node`: the folder of the Node that runs it, since npm takes an older release of a
    package whose newest one does not run on that Node."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("npm is not on PATH; install Node 20 or a later one")
    home.mkdir(parents=True, exist_ok=True)
    path = os.environ["PATH"] if node is None else f"{node}{os.pathsep}{os.environ['PATH']}"
    run_installer(
        [npm, "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(home), *packages],
        {**os.environ, "PATH": path},
    )


def _node(folder: Path, console: Console) -> Path:
    """Return the folder of a Node that all programs run on: the one on PATH, else one from npm."""
    found = shutil.which("node")
    if found and _major(found) >= _NODE_MAJOR:
        return Path(found).resolve().parent
    home = folder / "node"
    node = home / "node_modules" / NODE.partition("@")[0] / "bin"
    if not node.exists():
        with console.status(f"installing {NODE}: Node on PATH is older than {_NODE_MAJOR} ..."):
            _npm(home, [NODE])
    return node


def _major(node: str) -> int:
    written = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    found = re.match(r"v(\d+)", written)
    return int(found[1]) if found else 0


def _version(program: Program, home: Path) -> str:
    name = program.packages[0].partition("[")[0]
    if program.python:
        command = [str(home / "bin" / "python"), "-c", f"import importlib.metadata as m; print(m.version({name!r}))"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "?"
    return str(json.loads((home / "node_modules" / name / "package.json").read_text("utf-8"))["version"])
