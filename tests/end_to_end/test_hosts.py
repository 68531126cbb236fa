"""The demo on hosts of many kinds: one that starts in a container of ours only has been started nowhere else."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from tests.support.stack import ROOT

DEMO = [sys.executable, "-m", "scripts.demo"]
PYTHONS = Path("~/.pyenv/versions").expanduser()
NOBODY = 65534
# As root in a mount namespace: leaves of root's home only what other users need to run this Python.
_OPEN_HOME = """\
home=~root
if [[ "$(readlink -f "$1")" == "$home"/* ]]; then
    base=$(dirname "$(dirname "$(readlink -f "$1")")")
    mount --bind "$base" /mnt && mount -t tmpfs -o mode=755 none "$home"
    mkdir -p "$base" && mount --move /mnt "$base"
fi
"""


@dataclass(frozen=True)
class Host:
    """A kind of host."""

    name: str
    before: str = ""  # shell commands of the demo's process; as root, and with a namespace, if they mount something
    env: dict[str, str | None] = field(default_factory=dict)  # None: not set
    exec: str = ""  # what starts the demo
    namespaces: str = ""  # options of unshare


HOSTS = [
    Host("without control groups", "mount -t tmpfs none /sys/fs/cgroup", namespaces="-m"),
    Host(
        "with a home that cannot be written", "mount -t tmpfs -o ro none /mnt; export HOME=/mnt", namespaces="-m"
    ),
    Host("with /tmp that cannot be written", "mount -t tmpfs -o ro none /tmp", {"TMPDIR": None}, namespaces="-m"),
    Host("with a checkout that cannot be written", "mount --bind -o ro . . && cd .", namespaces="-m"),
    Host(
        "without IPv6", "ip link set lo up; sysctl -qw net.ipv6.conf.all.disable_ipv6=1", namespaces="-n"
    ),
    Host(
        "with a user who has no name and no home",
        _OPEN_HOME,
        {"HOME": None, "PYTHONDONTWRITEBYTECODE": "1"},
        exec=f"setpriv --reuid {NOBODY - 1} --regid {NOBODY - 1} --clear-groups",
        namespaces="-m",
    ),
    Host(
        "with kernels of another user in /tmp",
        f"mount -t tmpfs -o mode=1777 none /tmp; mkdir -m 755 /tmp/mlx\n{_OPEN_HOME}",
        {"HOME": None, "TMPDIR": None, "PYTHONDONTWRITEBYTECODE": "1"},
        exec=f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups",
        namespaces="-m",
    ),
    Host("without a home", env={"HOME": None}),
    Host("with a folder for temporary files that is missing", env={"TMPDIR": "/no/such/folder"}),
    Host("with the language C", env={"LANG": "C", "LC_ALL": "C"}),
    Host("with a locale of ASCII", env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    Host("with files for their owner only", "umask 077"),
    Host("without a terminal", "exec <&-", {"TERM": None, "COLUMNS": None}),
]  # fmt: skip


@cache
def refused(namespaces: str) -> str:
    """Return why this machine gives no such namespaces; "" if it does."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    tried = subprocess.run(["unshare", namespaces, "true"], capture_output=True, text=True)
    return tried.stderr.strip()


def environment(**changed: str | None) -> dict[str, str]:
    env = {**os.environ, "COLUMNS": "80", "TERM": "dumb", **changed}
    return {name: value for name, value in env.items() if value is not None and not name.startswith("SLUICE_")}


def assert_runs(command: list[str], *, env: dict[str, str], folder: Path = ROOT, timeout_s: float = 180) -> None:
    ran = subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Your name is Petra." in ran.stdout
    assert "8 chats, " in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_the_demo_runs_on_a_host(host: Host) -> None:
    if host.namespaces and (why := refused(host.namespaces)):
        pytest.skip(why)
    script = f'set -e\n{host.before}\nexec {host.exec} "$@"'
    unshare = ["unshare", host.namespaces] if host.namespaces else []
    assert_runs([*unshare, "bash", "-c", script, "bash", *DEMO], env=environment(**host.env))
    assert not (ROOT / "~").exists()


def interpreter(*versions: str) -> str | None:
    """Return the first of these Pythons that is here and runs."""
    for version in versions:
        on_path = shutil.which(f"python{version}")
        for found in [*PYTHONS.glob(f"{version}.*/bin/python{version}"), *([on_path] if on_path else [])]:
            if subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
                return str(found)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("versions", [("3.11",), ("3.14", "3.13", "3.12")], ids=["oldest", "newest"])
def test_the_demo_sets_itself_up_in_a_folder_with_a_blank(versions: tuple[str, ...], tmp_path: Path) -> None:
    if (python := interpreter(*versions)) is None:
        pytest.skip(f"no Python {' or '.join(versions)} is here")
    checkout = tmp_path / "a folder" / "sluice"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info"))
    assert_runs(["./scripts/demo"], env=environment(SLUICE_PYTHON=None) | {"SLUICE_PYTHON": python}, folder=checkout,
                timeout_s=900)  # fmt: skip
