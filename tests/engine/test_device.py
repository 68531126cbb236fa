"""The memory of the device, and the limits that Linux sets."""

import time
from pathlib import Path

import mlx.core as mx
import pytest

from worker.engine.device import control_group_limits, describe, memory_limit, runs_ahead


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
