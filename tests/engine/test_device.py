"""The memory of the device, and the limits that Linux sets."""

import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from worker.engine.device import control_group_limits, describe, memory_limit, runs_ahead, set_memory_limits


def limits(root: Path, membership: str, files: dict[str, str]) -> list[int]:
    """Return the limits for a process in this group, if the control groups have these files."""
    for place, text in {"proc/self/cgroup": membership, **files}.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(f"{text}\n")
    return list(control_group_limits(root))


def test_memory_limits_of_the_control_group_and_its_parents_are_read(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/system/sluice/memory.max": "8000",
        "sys/fs/cgroup/system/memory.max": "9000",
        "sys/fs/cgroup/memory.max": "max",
    }
    assert limits(tmp_path, "0::/system/sluice", files) == [8000, 9000]


def test_container_with_the_hosts_group_name_reads_the_root_group(tmp_path: Path) -> None:
    assert limits(tmp_path, "0::/docker/4711", {"sys/fs/cgroup/memory.max": "7000"}) == [7000]


def test_control_groups_version_1_are_read(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "6000"}
    assert limits(tmp_path, "3:cpu:/here\n4:memory:/here", files) == [6000]


def test_nothing_above_the_control_groups_is_read(tmp_path: Path) -> None:
    assert limits(tmp_path, "0::/", {"sys/fs/memory.max": "1", "memory.max": "1"}) == []


def test_without_control_groups_there_are_no_limits(tmp_path: Path) -> None:
    assert list(control_group_limits(tmp_path)) == []


def test_device_has_memory_and_a_name() -> None:
    assert memory_limit() > 100_000_000
    assert describe()


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collects the bytes that MLX is told to keep resident. Other limits are restored."""
    before, limits = mx.get_memory_limit(), list[int]()
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    yield limits
    mx.set_memory_limit(before)


def test_mlx_is_told_how_much_memory_it_may_hold(wired: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a CPU"})
    set_memory_limits(3 * 10**9)
    assert mx.get_memory_limit() == 3 * 10**9
    assert not wired


def test_memory_of_a_macs_gpu_stays_resident(wired: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 12 * 10**9})
    set_memory_limits(3 * 10**9)
    assert wired == [12 * 10**9]


@pytest.mark.timing
def test_device_runs_ahead_if_handing_over_a_step_takes_less_time_than_computing_it() -> None:
    weights = mx.random.normal((512, 512))
    mx.eval(product := weights + 0)
    for _ in range(100):
        product = product @ weights * 0.01
    began = time.perf_counter()
    mx.async_eval(product)
    launched = time.perf_counter()
    mx.eval(product)
    computed = time.perf_counter()
    assert runs_ahead() == (launched - began < (computed - began) / 2)
