"""Puts one server under a load, and measures the server, the processes of the load, and the machine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import redis

from scripts.benchmarks.capacity.process import Load, Measured, Share
from scripts.benchmarks.serve.figures import Quantiles
from tests.support.stack import ROOT, Server

Limit = Literal["server", "load", "machine", ""]


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the server, by its own statistics; a script counts, and so do its commands."""

    name: str
    calls_per_s: float
    us: float  # of a call


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of one server under one load. CPU is in cores; seconds are of this machine's clock."""

    server: str  # its kind and version
    load: Load
    tokens_per_s: float
    kept: float  # share of the tokens that the load asked for
    failed: int  # chats that were given up since the server did not answer for long
    commands_per_s: float  # with those of scripts
    server_cpu: float
    pickup: Quantiles  # submission until the job runs
    token: Quantiles  # append until a client has it
    in_bytes_per_s: float
    out_bytes_per_s: float
    memory_bytes: float
    connections: int
    commands: list[Command]  # those that took the server the most time first
    load_cpu: float  # of the busiest process of the load
    lag_p99_s: float  # by which the event loop of the worst process of the load woke late
    machine_cpu: float  # of all; NaN if unknown
    other_cpu: float  # of programs that do not belong to the benchmark; NaN if unknown

    @property
    def cpu_us_per_token(self) -> float:
        """Microseconds of the server's CPU for a token that was appended, with all else that it did: hardly depends on
        what else the machine does, and a million of them over this is what one core carries."""
        return 1e6 * self.server_cpu / self.tokens_per_s if self.tokens_per_s else float("nan")

    @property
    def limit(self) -> Limit:
        """The part that is full: the server, a process of the load, or the machine; '' if none is."""
        if self.server_cpu > 0.9:  # of the one core that executes commands
            return "server"
        if self.load_cpu > 0.85:
            return "load"
        if self.machine_cpu > 0.95 * (os.cpu_count() or 1):
            return "machine"
        return "load" if self.lag_p99_s > 0.01 else ""


def measure(binary: str, load: Load, seconds: float, processes: int) -> Figures:
    """Start a server and the processes of the load, and return the figures of that many seconds. Raises RuntimeError
    if a process ends."""
    with ExitStack() as stack:
        # As `sluice up` starts it: each change is appended to a file.
        server = stack.enter_context(Server(binary, args=("--appendonly", "yes")))
        client = stack.enter_context(redis.Redis.from_url(server.url))
        started = list[_Process]()
        for kind, number in (("workers", processes), ("chats", max(1, processes // 2))):
            shares = [Share(server.url, kind, load, each, number) for each in range(number)]  # type: ignore[arg-type]
            started += (new := [stack.enter_context(_Process(share)) for share in shares])
            for process in new:
                process.read_line()
        time.sleep(load.workers * load.rows / 500 + 2.0)  # until all chats have begun
        begin = time.time() + 0.1
        for process in started:
            process.write(f"{begin} {begin + seconds}\n")
        time.sleep(begin - time.time())
        before, machine_before = _info(client), _machine_cpu_s()
        time.sleep(begin + seconds - time.time())
        after, machine_after = _info(client), _machine_cpu_s()
        measured = [Measured(**json.loads(process.read_line())) for process in started]
    return _figures(load, seconds, measured, (before, after), machine_after - machine_before)


class _Process:
    """A process of the load, killed at the end of the block."""

    def __init__(self, share: Share) -> None:
        command = [sys.executable, "-m", "scripts.benchmarks.capacity.process", json.dumps(asdict(share))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_environment()
        )

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def write(self, text: str) -> None:
        """Write to its input."""
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def read_line(self) -> str:
        """Return the next line of its output. Raises RuntimeError if it has ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("a process of the load has ended; its error is above")
        return line


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}


def _info(client: "redis.Redis") -> dict[str, Any]:
    info: Any = client.info("everything")
    return {**info, "at": time.monotonic()}


def _machine_cpu_s() -> float:
    """Return the CPU seconds of all programs since the machine started; NaN on systems without /proc."""
    try:
        _, user, nice, system, _, _, irq, soft_irq, *_ = Path("/proc/stat").read_text("utf-8").splitlines()[0].split()
    except OSError:
        return float("nan")
    ticks = sum(int(each) for each in (user, nice, system, irq, soft_irq))
    return ticks / int(os.sysconf("SC_CLK_TCK"))


def _figures(
    load: Load, seconds: float, measured: list[Measured], infos: tuple[dict[str, Any], dict[str, Any]], machine_s: float
) -> Figures:
    before, after = infos
    took_s: float = after["at"] - before["at"]

    def rate(*names: str) -> float:
        return sum(float(after[name] - before[name]) for name in names) / took_s

    tokens, server_cpu = sum(each.tokens for each in measured), rate("used_cpu_user", "used_cpu_sys")
    cpus = [each.cpu_s / seconds for each in measured]
    return Figures(
        server=server_name(after),
        load=load,
        tokens_per_s=tokens / seconds,
        kept=tokens / seconds / (load.workers * load.rows * load.steps),
        failed=sum(each.failed for each in measured),
        commands_per_s=rate("total_commands_processed"),
        server_cpu=server_cpu,
        pickup=Quantiles.of(_all(each.pickups for each in measured)),
        token=Quantiles.of(_all(each.received for each in measured)),
        in_bytes_per_s=rate("total_net_input_bytes"),
        out_bytes_per_s=rate("total_net_output_bytes"),
        memory_bytes=after["used_memory"],
        connections=after["connected_clients"],
        commands=_commands(before, after, took_s),
        load_cpu=max(cpus),
        lag_p99_s=max(Quantiles.of(each.lags).p99 for each in measured),
        machine_cpu=machine_s / took_s,
        other_cpu=max(0.0, machine_s / took_s - server_cpu - sum(cpus)),
    )


def server_name(info: Mapping[str, Any]) -> str:
    """Return the kind and the version of a server, from its INFO."""
    valkey = info.get("valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {info['redis_version']}"


def _all(lists: Iterable[list[float]]) -> list[float]:
    return [value for values in lists for value in values]


def _commands(before: Mapping[str, Any], after: Mapping[str, Any], took_s: float) -> list[Command]:
    """Return the commands, those that took the most time first."""
    spent = list[tuple[float, Command]]()
    for name, stats in after.items():
        if name.startswith("cmdstat_"):
            earlier = before.get(name, {"calls": 0, "usec": 0})
            calls, usec = stats["calls"] - earlier["calls"], stats["usec"] - earlier["usec"]
            if calls:
                spent.append((usec, Command(name.removeprefix("cmdstat_"), calls / took_s, usec / calls)))
    return [command for _, command in sorted(spent, key=lambda each: -each[0])]
