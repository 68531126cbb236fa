"""Services of systemd and launchd: their files, and how they are installed and removed."""

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.cli.app import app
from sluice.cli.commands.service import Service, manager
from sluice.cli.errors import CliError
from tests.end_to_end.test_cli import run_here

AWKWARD = ("worker", "--model", 'a "b" 100% $HOME \\n', "--max-rows", "4")


def service(folder: Path, *command: str, at_boot: bool = False) -> Service:
    return Service("ada", command or AWKWARD, folder, at_boot)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("at_boot", [False, True])
def test_systemd_accepts_the_unit(at_boot: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    unit = tmp_path / "sluice-ada.service"
    unit.write_text(manager(at_boot=at_boot).text(service(tmp_path, at_boot=at_boot)))
    scope = [] if at_boot else ["--user"]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", "verify", *scope, str(unit)], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_quotes_what_systemd_would_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    lines = manager(at_boot=False).text(service(tmp_path)).splitlines()
    (command,) = (line for line in lines if line.startswith("ExecStart="))
    assert command.endswith('"worker" "--model" "a \\"b\\" 100%% $$HOME \\\\n" "--max-rows" "4"')
    lines = manager(at_boot=False).text(service(tmp_path, "worker", "--model", "a\nUser=root\rb")).splitlines()
    assert [line for line in lines if line.startswith(("User", "b"))] == []
    assert any(line.endswith('"a\\nUser=root\\rb"') for line in lines)


def test_the_agent_is_a_property_list_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("HOME", str(tmp_path))
    described = plistlib.loads(manager(at_boot=False).text(service(tmp_path)).encode())
    log = str(tmp_path / "Library" / "Logs" / "sluice" / "ada.log")
    assert described["ProgramArguments"] == [sys.executable, "-m", "sluice.cli", "service", "exec", log, *AWKWARD]
    assert described["WorkingDirectory"] == str(tmp_path)
    assert described["KeepAlive"] == {"SuccessfulExit": False}


def test_services_of_the_machine_are_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CliError, match="--boot"):
        manager(at_boot=True)


SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$HOME/asked"
case "$*" in *is-active*) echo active;; *broken*) echo "no such unit" >&2; exit 1;; esac
"""


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_a_service_is_installed_listed_upgraded_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "systemctl").chmod(0o755)
    env = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}

    def sluice(*args: str) -> tuple[int, str, str]:
        return run_here("service", *args, env=env, folder=tmp_path)

    unit = tmp_path / ".config" / "systemd" / "user" / "sluice-ada.service"
    assert sluice("install", "worker", "--service-name", "ada", "--model", "m")[0] == 0
    assert '"worker" "--model" "m"' in unit.read_text()
    assert sluice("install", "worker", "--service-name", "ada", "--model", "n")[0] == 0
    assert '"--model" "n"' in unit.read_text()
    assert ("ada" in sluice("status")[1], "active" in sluice("status")[1]) == (True, True)
    assert sluice("uninstall", "ada")[0] == 0
    assert not unit.exists()
    assert "no services" in sluice("status")[2]
    asked = [line for line in (tmp_path / "asked").read_text().splitlines() if "is-active" not in line]
    start = ["--user daemon-reload", "--user enable sluice-ada.service", "--user restart --no-block sluice-ada.service"]
    forgotten = ["--user daemon-reload", "--user reset-failed sluice-ada.service"]
    assert asked == [*start, *start, "--user disable --now sluice-ada.service", *forgotten]


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_what_the_manager_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "systemctl").chmod(0o755)
    env = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    install = ("service", "install", "up", "--service-name", "broken")
    code, _, err = run_here(*install, env=env, folder=tmp_path)
    assert (code, "no such unit" in err) == (2, True)
    unit = tmp_path / ".config" / "systemd" / "user" / "sluice-broken.service"
    assert not unit.exists()
    unit.write_text("as it was")
    assert run_here(*install, env=env, folder=tmp_path)[0] == 2
    assert unit.read_text() == "as it was"


LAUNCHCTL = """#!/bin/sh
echo "$@" >> "$HOME/asked"
case "$1" in
    bootstrap) touch "$HOME/loaded";;
    bootout) rm "$HOME/loaded";;
    print) [ -e "$HOME/loaded" ] && echo "	state = running";;
esac
"""


@pytest.mark.skipif(shutil.which("systemctl") is None, reason="needs systemctl")
def test_who_is_not_logged_in_is_told_how_to_be(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "DBUS_"))}
    code, _, err = run_here("service", "install", "up", env={**kept, "HOME": str(tmp_path)}, folder=tmp_path)
    assert (code, "log in by ssh" in err) == (2, True), err
    assert not list(tmp_path.rglob("*.service"))


def test_an_agent_is_installed_upgraded_and_removed_also_if_it_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launchctl").write_text(LAUNCHCTL)
    (tmp_path / "launchctl").chmod(0o755)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    agent = tmp_path / "Library" / "LaunchAgents" / "mlx.sluice.ada.plist"
    changes = [["bootstrap"], ["bootout", "bootstrap"], ["bootout"]]
    ada = ["--service-name", "ada"]
    for command, asked in zip(
        (["install", "up", *ada], ["install", "up", *ada], ["uninstall", "ada"]), changes, strict=True
    ):
        (tmp_path / "asked").write_text("")
        app(["service", *command], standalone_mode=False)
        lines = [line.split()[0] for line in (tmp_path / "asked").read_text().splitlines()]
        assert [line for line in lines if line != "print"] == asked
        assert agent.exists() is (command[0] == "install")
    app(["service", "install", "up", *ada], standalone_mode=False)
    (tmp_path / "loaded").unlink()
    app(["service", "uninstall", "ada"], standalone_mode=False)
    assert not agent.exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("install", "nothing"), "worker, gateway, up, or a TOML file"),
        (("install", "none.toml"), "that exists"),
        (("install", "worker", "--service-name", "../x"), "--service-name"),
        (("install", "gateway", "--model", "x"), "Usage: sluice serve"),
        (("install", "up", "--port", "many"), "--port"),
        (("uninstall", "ada"), "installed: none"),
        (("logs", "ada"), "installed: none"),
    ],
)
def test_mistakes_are_told(args: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, _, err = run_here("service", *args, env={"HOME": str(tmp_path)}, folder=tmp_path)
    assert (code, said in err) == (2, True)
