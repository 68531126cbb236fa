"""`sluice doctor`: checks what a worker, a gateway and their server need here, and says what to do."""

import asyncio
import os
import platform
import shutil
import socket
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sluice.cli.options import AsJson
from sluice.cli.terminal.output import print_json, print_table
from sluice.cli.terminal.view import note

if TYPE_CHECKING:
    from worker.settings import Settings

_PACKAGES = "mlx-sluice", "mlx", "mlx-lm", "mlx-vlm", "mlx-embeddings", "arq", "redis", "starlette"


@dataclass(frozen=True, slots=True)
class _Finding:
    """One line of the report."""

    subject: str
    state: Literal["ok", "warning", "problem"]
    text: str  # what was found; for a warning or a problem also what to do


def doctor(
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER_OR_HUB_ID", help="SLUICE_MODEL: the model to check too.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(metavar="URL", help="SLUICE_REDIS_URL: URL of the Redis server.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what a worker needs here: the machine, Redis, settings.

    Settings are read as by `sluice worker`, from the environment and .env in this folder. Nothing is changed, and the
    report has no passwords, prompts or answers: paste it into a report of a fault. Each line is ok, or says what to do.
    Exit codes: 0 nothing keeps a worker from serving, 1 something does.

    \b
    Examples:
      sluice doctor
      sluice doctor --model mlx-community/Qwen3-4B-4bit --json
    """
    given = {name: value for name, value in {"model": model, "redis_url": redis_url}.items() if value is not None}
    findings = [*_host(), *_with_settings(given)]
    if as_json:
        print_json({"findings": [asdict(each) for each in findings]})
    else:
        rows = ((each.state, each.subject, each.text) for each in findings)
        print_table("This machine, for a worker", {"": "left", "what": "left", "found": "left"}, rows, whole={""})
    problems = sum(each.state == "problem" for each in findings)
    if problems:
        note(f"{problems} of {len(findings)} checks found what keeps a worker from serving.", style="red")
        raise typer.Exit(1)


def _host() -> Iterator[_Finding]:
    """Yield what does not depend on settings."""
    from worker.engine.device import describe, runs_ahead

    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() == "Darwin" and platform.machine() != "arm64":
        yield _Finding("system", "problem", f"{system}: MLX needs Apple silicon and a Python for it, not for Rosetta.")
    else:
        yield _Finding("system", "ok", system)
    yield _Finding("Python", "ok", f"{platform.python_version()}, {sys.prefix}")
    yield _Finding("packages", "ok", ", ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name))))
    device = describe() if runs_ahead() else f"the CPU ({os.cpu_count()} cores)"
    if runs_ahead() or shutil.which("g++"):
        yield _Finding("MLX device", "ok", device)
    else:
        yield _Finding("MLX device", "warning", f"{device}: without g++ MLX compiles no kernels; install it.")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _with_settings(given: dict[str, str]) -> Iterator[_Finding]:
    from worker.environment import read_unchecked, variable
    from worker.errors import CannotStart
    from worker.settings import Settings, read_settings

    written = read_unchecked(Settings) | given
    try:
        settings = read_settings(**{"model": ".", **given} if "model" not in written else given)
    except CannotStart as error:
        yield _Finding("settings", "problem", str(error))
        return
    names = ", ".join(map(variable, sorted(written)))
    yield _Finding("settings", "ok", f"set: {names}" if names else "none is set, so all have their defaults")
    yield from _memory(settings)
    yield from _server(settings)
    yield from _folders(settings)
    yield _model(settings.model if "model" in written else None)
    yield from _ports(settings)


def _memory(settings: "Settings") -> Iterator[_Finding]:
    from worker.engine.device import memory_for_model, memory_limit
    from worker.engine.memory import format_bytes
    from worker.errors import CannotStart

    try:
        given = memory_for_model(settings.memory_gb, settings.memory_headroom_gb)
    except CannotStart as error:
        yield _Finding("memory", "problem", str(error))
        return
    yield _Finding("memory", "ok", f"{format_bytes(given)} for models, of {format_bytes(memory_limit())} for MLX")


def _server(settings: "Settings") -> Iterator[_Finding]:
    """Yield what is found of the Redis server, which may take five seconds."""
    from worker.errors import CannotStart
    from worker.queue.redis_server import examine

    try:
        warnings, times, ahead_s = asyncio.run(examine(settings))
    except CannotStart as error:
        yield _Finding("Redis", "problem", str(error))
        return
    yield _latency(settings.server, times)
    yield _clock(ahead_s)
    yield from (_Finding("Redis", "warning", text) for text in warnings)
    if not warnings:
        yield _Finding("Redis", "ok", "evicts nothing, writes to disk, and lets its user do what a worker needs")


def _latency(server: str, times: list[float]) -> _Finding:
    """`times`: seconds of round trips. A token waits for one on its way."""
    usual, longest = statistics.median(times), max(times)
    text = f"{server}: {usual * 1000:.1f} ms to it and back, at most {longest * 1000:.1f} ms"
    if usual <= 0.01:
        return _Finding("Redis", "ok", text)
    return _Finding("Redis", "warning", f"{text}; each token waits for it, so use a server that is nearer.")


def _clock(ahead_s: float) -> _Finding:
    """`ahead_s`: seconds that the server's clock is ahead of this machine's."""
    if abs(ahead_s) <= 1.0:
        return _Finding("clock", "ok", f"{abs(ahead_s):.3f} s from the server's")
    text = f"{abs(ahead_s):.0f} s from the server's; set both by NTP, or waits in the log and deadlines are wrong."
    return _Finding("clock", "warning", text)


def _folders(settings: "Settings") -> Iterator[_Finding]:
    from worker.engine.memory import format_bytes
    from worker.engine.upstream.hub import HF_HUB_CACHE

    named = {
        "downloads": Path(HF_HUB_CACHE),
        "SLUICE_PREFIX_DISK_DIR": settings.prefix_disk_dir,
        "SLUICE_BATCH_DIR": settings.batch_dir,
    }
    for name, folder in named.items():
        if folder is None:
            continue
        path = Path(folder).absolute()
        there = next(each for each in (path, *path.parents) if os.path.exists(each))
        if not os.access(there, os.W_OK):
            yield _Finding(
                name, "problem", f"{folder}: this user may not write to {there}; change its rights or owner."
            )
            continue
        free = shutil.disk_usage(there).free
        text = f"{folder}: {format_bytes(free)} free"
        if free >= 5e9:  # less than most models in 4 bits
            yield _Finding(name, "ok", text)
        else:
            yield _Finding(name, "warning", f"{text}, less than most models take; remove what is not needed.")


def _model(model: str | None) -> _Finding:
    from worker.cli.check import blockers_of
    from worker.errors import CannotStart

    if model is None:
        return _Finding("model", "ok", "none is set; --model FOLDER_OR_HUB_ID checks one")
    try:
        blockers = blockers_of(model)
    except CannotStart as error:
        return _Finding("model", "problem", str(error))
    if blockers:
        return _Finding("model", "problem", f"{model}: {' '.join(blockers)}")
    return _Finding("model", "ok", f"{model} can be served; `sluice check` has its numbers")


def _ports(settings: "Settings") -> Iterator[_Finding]:
    ports = {"SLUICE_METRICS_PORT": ("", settings.metrics_port)}
    try:
        from sluice.gateway.settings import CannotServe, read_serve_settings
    except ImportError:
        yield _Finding("gateway", "ok", "not installed")
    else:
        try:
            serve = read_serve_settings()
        except CannotServe as error:
            yield _Finding("gateway", "problem", str(error))
        else:
            ports["SLUICE_SERVE_PORT"] = (serve.host, serve.port)
    for name, (host, port) in ports.items():
        if port:
            yield _port(name, host, port)


def _port(name: str, host: str, port: int) -> _Finding:
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        text = f"{port}: {error.strerror}. Unless that is the worker or gateway that runs here, choose another."
        return _Finding(name, "warning", text)
    return _Finding(name, "ok", f"{port} is free")
