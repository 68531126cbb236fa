"""The watch passes on what changes, outlives a machine that cannot be read, and holds sleep off while jobs run."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sluice.contract.keys import Lane
from tests.host.simulated import SimulatedHost
from tests.waiting import until
from worker.host.courtesy import Pressure, Reclaim, Signals, Throttle
from worker.host.watch import HostWatch, _StayAwake, this_host
from worker.monitoring.metrics import Metrics
from worker.settings import Settings

COMMAND = ("env",)  # runs the command after it, as caffeinate does


def settings(**given: str) -> Settings:
    return Settings(_env_file=None, model="m", **given)  # type: ignore[arg-type, call-arg]


@contextmanager
def watched(host: SimulatedHost, jobs: dict[Lane, int], **given: str) -> Iterator[tuple[list[Throttle], Metrics]]:
    """Watch a machine, and yield what is passed on and the metrics."""
    passed, metrics = list[Throttle](), Metrics("m")
    watch = HostWatch(settings(**given), metrics, passed.append, host, every_s=0.001)
    task = asyncio.create_task(watch.run(lambda: jobs))
    try:
        yield passed, metrics
    finally:
        task.cancel()


async def test_a_change_is_passed_on_once_and_shown() -> None:
    host = SimulatedHost()
    with watched(host, {}) as (passed, metrics):
        await until(lambda: host.readings > 3)
        assert passed == []
        host.signals = Signals(Pressure.WARNING, idle_s=3.0, on_battery=True)
        await until(lambda: len(passed) > 0)
        before = host.readings
        await until(lambda: host.readings > before + 3)
        assert passed == [Throttle(1.0, 0.25, Reclaim.HALF_CACHES)]
        value = metrics.registry.get_sample_value
        names = "memory_pressure", "memory_reclaim", "step_share", "offline_step_share", "machine_on_battery"
        assert [value(f"sluice:{name}", {"model_name": "m"}) for name in names] == [1, 1, 1, 0.25, 1]
        shown = metrics.measured()
        assert [shown[name] for name in ("memory_pressure", "memory_reclaim", "machine")] == [
            "warning", "half_caches", "in_use on_battery"
        ]  # fmt: skip


async def test_a_machine_that_cannot_be_read_is_fine_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    host = SimulatedHost()
    host.problem = ValueError("a sensor")
    with watched(host, {}) as (passed, _):
        await until(lambda: host.readings > 3)
        assert passed == []
        assert len(caplog.records) == 1
        host.problem = None
        host.press(Pressure.CRITICAL)
        await until(lambda: len(passed) > 0)


async def test_the_machine_is_told_if_jobs_run() -> None:
    host, jobs = SimulatedHost(), dict[Lane, int](interactive=0, batch=0)
    with watched(host, jobs, stay_awake="off"):
        await until(lambda: host.readings > 0)
        assert not host.busy
        jobs["batch"] = 1
        await until(lambda: host.busy)


async def test_the_loop_goes_on_while_a_reading_hangs() -> None:
    host = SimulatedHost()
    host.read = lambda **_: time.sleep(0.3) or Signals()  # type: ignore[method-assign, func-returns-value]
    with watched(host, {}):
        began = time.monotonic()
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert time.monotonic() - began < 0.2


def test_this_machine_has_a_host() -> None:
    assert this_host().read().pressure in Pressure


def children() -> list[int]:
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=True)
    ours = [line.split() for line in found.stdout.splitlines() if line.split()[1] == str(os.getpid())]
    return [int(pid) for pid, _, name, *_ in ours if name.rpartition("/")[2] in ("env", "cat")]  # before and after exec


@pytest.mark.parametrize(
    ("setting", "jobs", "on_battery", "held"),
    [
        ("auto", {}, False, False),
        ("auto", {"interactive": 1}, False, True),
        ("auto", {"interactive": 1}, True, True),
        ("auto", {"batch": 1}, False, True),
        ("auto", {"batch": 1}, True, False),
        ("always", {"batch": 1}, True, True),
        ("off", {"interactive": 1}, False, False),
    ],
)
def test_sleep_is_held_off_while_jobs_run(setting: str, jobs: dict[Lane, int], on_battery: bool, held: bool) -> None:
    awake = _StayAwake(setting)
    try:
        assert awake.hold(COMMAND, jobs, Signals(on_battery=on_battery), 0.0) is held
        assert bool(children()) is held
    finally:
        awake.release()
    assert children() == []


def test_it_is_held_off_for_a_minute_after_the_last_job() -> None:
    awake = _StayAwake("auto")
    assert [awake.hold(COMMAND, jobs, Signals(), now) for jobs, now in (({"interactive": 1}, 0.0), ({}, 59.0))] == [
        True
    ] * 2
    assert len(children()) == 1
    assert not awake.hold(COMMAND, {}, Signals(), 60.0)
    assert children() == []


def test_a_system_that_denies_it_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    awake, jobs = _StayAwake("auto"), {"interactive": 1}
    awake.hold(("false",), jobs, Signals(), 0.0)  # type: ignore[arg-type]
    assert awake._child is not None
    awake._child.wait()
    assert [awake.hold(("false",), jobs, Signals(), now) for now in (1.0, 2.0)] == [False] * 2  # type: ignore[arg-type]
    assert len(caplog.records) == 1


def test_a_command_that_is_missing_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    awake, jobs = _StayAwake("auto"), dict[Lane, int](batch=1)
    assert [awake.hold(("/no/such/command",), jobs, Signals(), now) for now in (0.0, 1.0)] == [False] * 2
    assert len(caplog.records) == 1


def test_a_killed_worker_lets_the_machine_sleep(tmp_path: Path) -> None:
    code = (
        "import time; from worker.host.watch import _StayAwake; from worker.host.courtesy import Signals\n"
        "a = _StayAwake('auto'); a.hold(('env',), {'batch': 1}, Signals(), 0.0)\n"
        "print(a._child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        child = Path(f"/proc/{int(worker.stdout.readline())}")
        assert child.exists()
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    end = time.monotonic() + 60
    while child.exists() and "State:\tZ" not in (child / "status").read_text("utf-8"):
        assert time.monotonic() < end
        time.sleep(0.01)
