"""Installs a client into a folder of its own, so that the versions of one do not bind another."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.conformance.catalog import Client
from tests.support.stack import ROOT

CHECKS = Path(__file__).parent / "checks"
_INSTALL_S = 1_800.0  # Open WebUI brings PyTorch
_REASON_LINES = 5  # of the output of pip or npm


class NotInstalled(Exception):
    """A client could not be installed; the message has the reason."""


def install(client: Client, folder: Path) -> list[str]:
    """Install the newest release of the client below `folder`, unless it is there. Returns the command that runs its
    checks. Raises `NotInstalled`."""
    home = folder / client.name
    return _node(client, home) if client.needs_node else _python(client, home)


def environment(url: str) -> dict[str, str]:
    """Return the environment of the checks: of this process, with the URL of the gateway and without any proxy."""
    others = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**others, "SLUICE_CONFORMANCE_URL": url, "PYTHONPATH": str(ROOT), "NO_PROXY": "*"}


def _python(client: Client, home: Path) -> list[str]:
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        run_installer([sys.executable, "-m", "venv", "--clear", str(home)])
        run_installer([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *client.packages])
        (home / "installed").touch()
    return [str(python), "-m", f"tests.support.conformance.checks.{Path(client.script).stem}"]


def _node(client: Client, home: Path) -> list[str]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise NotInstalled("node and npm are not on PATH; install Node 20 or a later one")
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "installed").exists():
        run_installer([npm, "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(home), *client.packages])
        (home / "installed").touch()
    for file in (client.script, "checking.mjs", "requests.json"):  # modules are found from the file that imports them
        shutil.copy(CHECKS / file, home)
    return [node, str(home / client.script)]


def run_installer(command: list[str], env: Mapping[str, str] | None = None) -> None:
    """Run pip or npm. `env`: by default this process's. Raises `NotInstalled` with the end of its output."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_S, env=env)
    except subprocess.CalledProcessError as error:
        written = f"{error.stdout}{error.stderr}".strip().splitlines()
        raise NotInstalled("\n".join(written[-_REASON_LINES:])) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)) from None
