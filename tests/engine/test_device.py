"""The memory of the device, and the limits that Linux sets."""

import ctypes
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from worker.engine import device
from worker.engine.device import (
    control_group_limits,
    describe,
    memory_for_model,
    memory_limit,
    runs_ahead,
    set_kernel_folder,
    set_memory_limits,
)
from worker.errors import CannotStart


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


def test_limits_of_a_second_hierarchy_are_read_too(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),  # version 1 without a limit
        "sys/fs/cgroup/unified/sluice/memory.max": "5000",
    }
    assert limits(tmp_path, "4:memory:/\n0::/sluice", files) == [2**63 - 4096, 5000]
    assert limits(tmp_path, "4:cpu,memory:/", {}) == [2**63 - 4096]


@pytest.mark.parametrize("unreadable", ["a folder", "a file of another user", "no number"])
def test_a_limit_that_cannot_be_read_is_left_out(tmp_path: Path, unreadable: str) -> None:
    file = tmp_path / "sys/fs/cgroup/group/memory.max"
    file.parent.mkdir(parents=True)
    match unreadable:
        case "a folder":
            file.mkdir()
        case "a file of another user":
            file.symlink_to("/proc/self/mem")  # which cannot be read from its start, by root neither
        case "no number":
            file.write_bytes(b"\xff-1")
    assert limits(tmp_path, "0::/group", {"sys/fs/cgroup/memory.max": "7000"}) == [7000]


def test_a_group_s_name_may_have_any_bytes(tmp_path: Path) -> None:
    limits(tmp_path, "0::/", {"sys/fs/cgroup/memory.max": "7000"})
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/a:b\xff\n")
    assert list(control_group_limits(tmp_path)) == [7000]


def test_without_limits_of_control_groups_the_memory_is_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", dict)
    monkeypatch.setattr(device, "control_group_limits", lambda: iter(()))
    assert memory_limit() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(device, "control_group_limits", lambda: iter((2**63 - 4096, 5000)))
    assert memory_limit() == 5000


@pytest.mark.parametrize(
    ("wanted_gb", "headroom_gb", "named"),
    [
        (1.0, 1.0, ("SLUICE_MEMORY_GB = 1:", "SLUICE_MEMORY_HEADROOM_GB = 1 ", "of the 1 GB")),
        (0.5, 1.0, ("SLUICE_MEMORY_GB = 0.5:", "SLUICE_MEMORY_HEADROOM_GB = 1 ")),
        (None, 8.0, ("SLUICE_MEMORY_GB is not set:", "SLUICE_MEMORY_HEADROOM_GB = 8 ", "of the 8 GB")),
        (64.0, 8.5, ("SLUICE_MEMORY_GB = 64:", "SLUICE_MEMORY_HEADROOM_GB = 8.5 ", "of the 8 GB")),
    ],
)
def test_a_limit_that_leaves_nothing_for_the_model_is_refused_with_both_settings(
    monkeypatch: pytest.MonkeyPatch, wanted_gb: float | None, headroom_gb: float, named: tuple[str, ...]
) -> None:
    monkeypatch.setattr(device, "memory_limit", lambda: 8 * 10**9)
    with pytest.raises(CannotStart) as refused:
        memory_for_model(wanted_gb, headroom_gb)
    assert [words for words in named if words not in str(refused.value)] == []


def test_a_limit_just_above_the_headroom_is_what_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory_limit", lambda: 8 * 10**9)
    assert [memory_for_model(1.2, 1.0), memory_for_model(None, 1.0)] == [2 * 10**8, 7 * 10**9]
    assert memory_for_model(1.0, 0.0) == 10**9


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder that Python has chosen for temporary files, which is not TMPDIR."""
    before = libc_getenv(b"TMPDIR")
    os.putenv("TMPDIR", "/no/such/folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(device, "runs_ahead", lambda: False)
    yield tmp_path
    os.unsetenv("TMPDIR") if before is None else os.putenv("TMPDIR", before)


def libc_getenv(name: bytes) -> bytes | None:
    """Return a variable as MLX reads it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value: bytes | None = getenv(name)
    return value


def test_kernels_are_kept_in_a_folder_of_this_user(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        set_kernel_folder()
        folder = temporary / f"sluice-{os.getuid()}"
        assert libc_getenv(b"TMPDIR") == str(folder).encode()
        assert oct(folder.stat().st_mode & 0o777) == "0o700"
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    (temporary / "sluice-4711").mkdir()
    with pytest.raises(CannotStart, match="TMPDIR: .*sluice-4711 can be written by other users"):
        set_kernel_folder()


def test_a_kernel_folder_that_others_can_write_is_refused(temporary: Path) -> None:
    (temporary / f"sluice-{os.getuid()}").mkdir(mode=0o777)
    (temporary / f"sluice-{os.getuid()}").chmod(0o777)
    with pytest.raises(CannotStart, match="can be written by other users"):
        set_kernel_folder()


def test_without_a_folder_for_temporary_files_the_error_names_it(temporary: Path) -> None:
    (temporary / f"sluice-{os.getuid()}").write_text("")
    with pytest.raises(CannotStart, match="^TMPDIR: "):
        set_kernel_folder()


def test_device_has_memory_and_a_name() -> None:
    assert memory_limit() > 100_000_000
    assert describe()


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collects the bytes that MLX is told to keep resident. Other limits are restored."""
    before, limits = mx.get_memory_limit(), list[int]()
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    monkeypatch.setattr(mx, "set_cache_limit", lambda nbytes: None)
    yield limits
    mx.set_memory_limit(before)


def test_mlx_is_told_how_much_memory_it_may_hold(wired: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a CPU"})
    set_memory_limits(3 * 10**9)
    assert mx.get_memory_limit() == 3 * 10**9
    assert not wired


def test_a_worker_keeps_its_share_of_a_macs_memory_resident_and_no_more_than_metal_allows(
    wired: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 12 * 10**9})
    set_memory_limits(3 * 10**9)
    set_memory_limits(30 * 10**9)
    assert wired == [3 * 10**9, 12 * 10**9]


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
