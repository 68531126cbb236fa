"""`sluice service`: runs commands of Sluice as services of this machine, units of systemd on Linux and agents of
launchd on macOS."""

import getpass
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from sluice.cli.errors import CliError
from sluice.cli.options import integer
from sluice.cli.terminal.output import print_table
from sluice.cli.terminal.view import note
from sluice.log_lines import escaped

_PREFIX = "sluice-"
_LABEL = "mlx.sluice."  # of launchd, which names agents like domains


@dataclass(frozen=True, slots=True)
class Service:
    """What a service runs, and when."""

    name: str
    command: tuple[str, ...]  # the arguments of `sluice`
    folder: Path  # in which it runs, and which has its `.env`
    at_boot: bool  # for the whole machine; else at the login of this user

    @property
    def program(self) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", "sluice.cli", *self.command]


class Manager(Protocol):
    """The program that runs the services of a machine."""

    def file(self, name: str) -> Path:
        """Return the file that describes a service, whether it exists or not."""
        ...

    def text(self, service: Service) -> str:
        """Return the content of that file."""
        ...

    def start(self, name: str) -> None:
        """Start a service now and at every login or boot, or restart it with a new file. Raises `CliError`."""
        ...

    def stop(self, name: str) -> None:
        """Stop a service, and start it no more. Raises `CliError`."""
        ...

    def forget(self, name: str) -> None:
        """Drop what is known of a stopped service whose file is gone."""
        ...

    def state(self, name: str) -> str:
        """Return a service's state in the manager's word, such as active."""
        ...

    def log_command(self, name: str, lines: int, *, follow: bool) -> list[str]:
        """Return the command that prints the last lines of a service's log."""
        ...


def manager(*, at_boot: bool) -> Manager:
    """Return this machine's manager, for services of this user or of the machine. Raises `CliError` if it has none."""
    if at_boot and os.geteuid() != 0:
        raise CliError("--boot: services of the whole machine are root's; run it with sudo, or without --boot.")
    if sys.platform == "darwin":
        return _Launchd(at_boot)
    if sys.platform == "linux":
        return _Systemd(at_boot)
    raise CliError(f"services are written for macOS and Linux, not for {sys.platform}.")


def installed(of: Manager) -> list[str]:
    """Return the names of the services that were installed with a manager."""
    pattern = of.file("*")
    head, _, tail = pattern.name.partition("*")
    return sorted(found.name.removeprefix(head).removesuffix(tail) for found in pattern.parent.glob(pattern.name))


# Rights that no service of ours needs. The second group takes a system's manager: a user's has no right to remove them.
_HARDENED = ("NoNewPrivileges=yes", "LockPersonality=yes", "RestrictRealtime=yes", "RestrictSUIDSGID=yes")
_HARDENED_AT_BOOT = (
    "PrivateTmp=yes", "ProtectSystem=full", "ProtectControlGroups=yes", "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes", "ProtectKernelLogs=yes", "ProtectClock=yes", "ProtectHostname=yes",
    "RestrictNamespaces=yes", "SystemCallArchitectures=native",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Systemd:
    at_boot: bool

    def file(self, name: str) -> Path:
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        folder = Path("/etc/systemd/system") if self.at_boot else config / "systemd" / "user"
        return folder / f"{_PREFIX}{name}.service"

    def text(self, service: Service) -> str:
        hardened = [*_HARDENED, *(_HARDENED_AT_BOOT if service.at_boot else ())]
        user = [f"User={os.environ.get('SUDO_USER') or getpass.getuser()}"] if service.at_boot else []
        after = ["Wants=network-online.target", "After=network-online.target"] if service.at_boot else []
        return "\n".join(
            [
                "[Unit]",
                f"Description=Sluice: {_specifiers(escaped(shlex.join(service.command)))}",
                *after,
                "StartLimitIntervalSec=0",
                "",
                "[Service]",
                "Type=notify",
                f"ExecStart={' '.join(map(_quoted, service.program))}",
                f"WorkingDirectory={_specifiers(str(service.folder))}",
                *user,
                "Restart=on-failure",
                "RestartSec=2",
                "# The settings are wrong, or the model cannot be served: see the log.",
                "RestartPreventExitStatus=2",
                "# A model may be downloaded first.",
                "TimeoutStartSec=infinity",
                "# For running jobs: see SLUICE_GRACE_S.",
                "TimeoutStopSec=300",
                "KillMode=mixed",
                "WatchdogSec=60",
                *hardened,
                "",
                "[Install]",
                f"WantedBy={'multi-user' if service.at_boot else 'default'}.target",
                "",
            ]
        )

    def start(self, name: str) -> None:
        unit = self.file(name).name
        self._run("daemon-reload")
        self._run("enable", unit)
        self._run("restart", "--no-block", unit)

    def stop(self, name: str) -> None:
        self._run("disable", "--now", self.file(name).name)

    def forget(self, name: str) -> None:
        self._run("daemon-reload")
        _output([*self._command, "reset-failed", self.file(name).name])  # refused unless it has failed

    def state(self, name: str) -> str:
        return _output([*self._command, "is-active", self.file(name).name]) or "unknown"

    def log_command(self, name: str, lines: int, *, follow: bool) -> list[str]:
        of = [] if self.at_boot else ["--user"]
        return ["journalctl", *of, "--unit", self.file(name).name, "--lines", str(lines), *(["--follow"] * follow)]

    def _run(self, *arguments: str) -> None:
        try:
            _run([*self._command, *arguments])
        except CliError as error:
            if self.at_boot or "XDG_RUNTIME_DIR" in os.environ:
                raise
            raise CliError(
                f"{error}. This is no login of the user, as after su: log in by ssh, or give --boot."
            ) from None

    @property
    def _command(self) -> list[str]:
        return ["systemctl"] if self.at_boot else ["systemctl", "--user"]


def _quoted(argument: str) -> str:
    """Return an argument as systemd.service(5) reads it."""
    quoted = escaped(_specifiers(argument).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$"))
    return f'"{quoted}"'


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")


@dataclass(frozen=True, slots=True)
class _Launchd:
    at_boot: bool

    def file(self, name: str) -> Path:
        folder = "LaunchDaemons" if self.at_boot else "LaunchAgents"
        return self._library / folder / f"{_LABEL}{name}.plist"

    def text(self, service: Service) -> str:
        import plistlib  # with a parser of XML, which no other command needs

        log = str(self._log(service.name))
        user = {"UserName": os.environ.get("SUDO_USER") or getpass.getuser()} if service.at_boot else {}
        described = {
            "Label": f"{_LABEL}{service.name}",
            "ProgramArguments": [sys.executable, "-m", "sluice.cli", "service", "exec", log, *service.command],
            "WorkingDirectory": str(service.folder),
            **user,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": 300,  # for running jobs: see SLUICE_GRACE_S
            "ProcessType": "Interactive",  # else macOS slows it down as background work
        }
        return plistlib.dumps(described, sort_keys=False).decode()

    def start(self, name: str) -> None:
        self._log(name).parent.mkdir(parents=True, exist_ok=True)
        self.stop(name)
        _run(["launchctl", "bootstrap", self._domain, str(self.file(name))])

    def stop(self, name: str) -> None:
        if self.state(name) != "not loaded":
            _run(["launchctl", "bootout", f"{self._domain}/{_LABEL}{name}"])

    def forget(self, name: str) -> None:
        """launchd knows only what is loaded."""

    def state(self, name: str) -> str:
        printed = _output(["launchctl", "print", f"{self._domain}/{_LABEL}{name}"]).splitlines()
        states = [line.partition(" = ")[2] for line in map(str.strip, printed) if line.startswith("state = ")]
        return states[0] if states else "not loaded"

    def log_command(self, name: str, lines: int, *, follow: bool) -> list[str]:
        return ["tail", "-n", str(lines), *(["-F"] * follow), str(self._log(name))]

    def _log(self, name: str) -> Path:
        return self._library / "Logs" / "sluice" / f"{name}.log"

    @property
    def _library(self) -> Path:
        return Path("/Library") if self.at_boot else Path.home() / "Library"

    @property
    def _domain(self) -> str:
        return "system" if self.at_boot else f"gui/{os.getuid()}"


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CliError(f"{command[0]} is not installed here; --print shows the file, for another manager.") from None
    if done.returncode:
        raise CliError(f"{shlex.join(command)} failed: {(done.stderr or done.stdout).strip()}")


def _output(command: Sequence[str]) -> str:
    """Return what a command prints; "" if it is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


_COMMANDS = {"worker": "worker", "gateway": "serve", "up": "up"}

AtBoot = Annotated[
    bool, typer.Option("--boot", help="Of the whole machine, from its start; needs root.  [default: at your login]")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The service, as in `sluice service status`.")]

service = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@service.callback()
def _about() -> None:
    """Run workers and gateways as services, at login or boot.

    On Linux by systemd, on macOS by launchd. A service runs in the folder in which it was installed, and reads its
    settings from `.env` there.

    \b
    Example:
      sluice service install worker --model mlx-community/Qwen3-4B-4bit
    """


@service.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
def install(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="worker|gateway|up|FILE.toml", help="What to run.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTIONS]...", help="Options of that command, such as --model.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--service-name", metavar="NAME", help="The service's name.  [default: worker, gateway, up, or the file's]"
        ),
    ] = None,
    boot: AtBoot = False,
    print_only: Annotated[bool, typer.Option("--print", help="Print the service's file, and install nothing.")] = False,
) -> None:
    """Install and start a worker, a gateway, `up`, or models.

    It runs in this folder. If it fails it is started again, unless its exit code is 2: then its settings are wrong, and
    its log says how. Installed again under its name, it is replaced and restarted: an upgrade.

    \b
    Examples:
      sluice service install worker --model mlx-community/Qwen3-4B-4bit
      sluice service install workers.toml
      sudo sluice service install gateway --boot --port 80
      sluice service install up --model models/tiny-chat --print
    """
    asked = _service(what, options or [], name, boot)
    _check_options(context, *asked.command)
    by = manager(at_boot=boot)
    if print_only:
        print(by.text(asked), end="")
        return
    file = by.file(asked.name)
    before = file.read_text("utf-8") if file.exists() else None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(by.text(asked), "utf-8")
    try:
        by.start(asked.name)
    except CliError:
        if before is None:
            file.unlink()
        else:
            file.write_text(before, "utf-8")
        raise
    note(f"{asked.name} is installed as {file}, and starts. See: sluice service logs {asked.name}")


def _service(what: str, options: list[str], name: str | None, at_boot: bool) -> Service:
    if what in _COMMANDS:
        command = [_COMMANDS[what], *options]
    elif what.endswith(".toml") and Path(what).is_file():
        command = ["worker", "--config", str(Path(what).absolute()), *options]
    else:
        raise CliError(f"{what}: it must be worker, gateway, up, or a TOML file of models that exists.")
    name = name or Path(what).stem
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise CliError(f"--service-name: {name!r} must be letters, digits, - and _; give another.")
    return Service(name, tuple(command), Path.cwd(), at_boot)


def _check_options(context: typer.Context, command: str, *options: str) -> None:
    """Refuse options that the command does not have, with its own message: the service would end with them."""
    root = context.find_root()
    commands: Mapping[str, Any] = getattr(root.command, "commands", {})
    commands[command].make_context(command, [*options], parent=root).close()


@service.command()
def status(boot: AtBoot = False) -> None:
    """List the installed services with their states."""
    by = manager(at_boot=boot)
    rows = [(name, by.state(name), str(by.file(name))) for name in installed(by)]
    if rows:
        print_table("Services", {"name": "left", "state": "left", "file": "left"}, rows, whole={"name"})
    else:
        note("no services are installed. See: sluice service install --help")


@service.command()
def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with new lines, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", parser=integer(1), metavar="N", help="So many.")] = 100,
    boot: AtBoot = False,
) -> None:
    """Show the end of a service's log."""
    by = manager(at_boot=boot)
    _refuse_unknown(name, installed(by))
    command = by.log_command(name, lines, follow=follow)
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        raise CliError(f"{command[0]} is not installed here.") from None


@service.command()
def uninstall(name: Name, boot: AtBoot = False) -> None:
    """Stop a service and remove it. Its folder, settings and log stay."""
    by = manager(at_boot=boot)
    _refuse_unknown(name, installed(by))
    by.stop(name)
    by.file(name).unlink()
    by.forget(name)
    note(f"{name} has stopped, and is no service any more.")


def _refuse_unknown(name: str, names: list[str]) -> None:
    if name not in names:
        raise CliError(f"there is no service {name!r}; installed: {', '.join(names) or 'none'}.")


@service.command("exec", hidden=True, context_settings={"ignore_unknown_options": True})
def execute(
    log: Annotated[Path, typer.Argument(metavar="LOG")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...")],
) -> None:
    """Run a command, with its output in a log that rotates: launchd keeps one file, of any size.

    An exit code of 2 becomes 0, with which launchd does not start the command again.
    """
    logger = logging.getLogger("sluice.service")
    logger.propagate = False
    logger.addHandler(RotatingFileHandler(log, maxBytes=10_000_000, backupCount=5, encoding="utf-8"))
    logger.setLevel("INFO")
    arguments = [sys.executable, "-m", "sluice.cli", *command]
    # In this process's group, which launchd ends if this process is killed.
    with subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as child:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda received, _: child.send_signal(received))
        assert child.stdout is not None
        for line in child.stdout:
            logger.info("%s", line.decode("utf-8", "replace").rstrip("\n"))
        code = child.wait()
    raise typer.Exit(0 if code == 2 else abs(code))
