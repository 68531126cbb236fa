"""Properties of the device: the only module that distinguishes Metal, CUDA and CPU."""

import io
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from worker.engine.memory import format_bytes
from worker.errors import CannotStart


def memory_limit() -> int:
    """Return the bytes that MLX may use. What other processes use at the moment is not subtracted."""
    info = mx.device_info()
    # Metal reports how much may stay on the GPU without slowing the system, CUDA the card's memory, a CPU nothing.
    for name in ("max_recommended_working_set_size", "total_memory"):
        if name in info:
            return int(info[name])
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *control_group_limits()])


def memory_for_model(wanted_gb: float | None, headroom_gb: float) -> int:
    """Return the bytes for the model and its caches: `wanted_gb`, at most what the device offers, minus the headroom. A
    GB is 1e9 bytes. Raises `CannotStart` if that leaves nothing."""
    offered = memory_limit()
    wanted = offered if wanted_gb is None else min(offered, int(wanted_gb * 1e9))
    left = wanted - int(headroom_gb * 1e9)
    if left <= 0:
        given = "is not set" if wanted_gb is None else f"= {wanted_gb:g}"
        raise CannotStart(
            f"SLUICE_MEMORY_GB {given}: of the {format_bytes(wanted)} that a worker may use on {describe()} nothing is "
            f"left for the model, since SLUICE_MEMORY_HEADROOM_GB = {headroom_gb:g} is kept free. Raise the one or "
            "lower the other."
        )
    return left


def set_memory_limits(nbytes: int) -> None:
    """Let MLX release the buffers that it keeps for later use before it holds more than `nbytes` in all, and keep as
    much of a Mac's memory resident: macOS may otherwise page out the weights of a worker that is idle, and the next
    answer would be slow (from macOS 15 on). For the whole process, before weights are loaded."""
    mx.set_memory_limit(nbytes)
    if resident := mx.device_info().get("max_recommended_working_set_size"):
        # More would be wired for several workers together than a Mac has, which stops it (ml-explore/mlx-lm#1252).
        mx.set_wired_limit(min(nbytes, int(resident)))
        # Kept buffers stay wired, and no other program has them: by default as many as the whole memory.
        mx.set_cache_limit(nbytes // 8)


def set_kernel_folder() -> None:
    """Let MLX store the kernels that it compiles for a CPU, and loads as code, in a folder that only this user can
    write. MLX 0.32.4 takes TMPDIR/mlx, where TMPDIR may be missing, and /tmp/mlx belongs to the user who came first.
    For the whole process, before a forward. Raises `CannotStart`."""
    if runs_ahead():
        return
    try:
        folder = Path(tempfile.gettempdir()) / f"sluice-{os.getuid()}"  # which Python has found to be writable
        folder.mkdir(0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise CannotStart(f"TMPDIR: no folder for temporary files can be written ({error}); set it to one.") from None
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not stat.S_ISDIR(found.st_mode):
        raise CannotStart(f"TMPDIR: {folder} can be written by other users; set it to a folder of your own.")
    os.putenv("TMPDIR", str(folder))  # for MLX, and not for Python's own temporary files


def control_group_limits(root: Path = Path("/")) -> Iterator[int]:
    """Yield the memory limits in bytes that Linux sets for this process: those of its control group and of its parents.
    Empty on other systems, and on hosts without control groups; a limit that cannot be read is left out."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for mounted in _mounted(root / "sys/fs/cgroup", controllers.split(",")):
            group = mounted / path.lstrip("/")
            # Inside a container the path may be the host's; then only the root group exists.
            for folder in [folder for folder in (group, *group.parents) if folder.is_relative_to(mounted)]:
                for name in ("memory.max", "memory.limit_in_bytes"):
                    if (text := _text(folder / name).strip()).isdecimal():  # not "max"
                        yield int(text)


def _mounted(cgroup: Path, controllers: list[str]) -> list[Path]:
    """Return the folders in which a hierarchy of control groups may be mounted, of those that can limit memory."""
    if controllers == [""]:
        return [cgroup, cgroup / "unified"]  # version 2, alone or beside version 1
    return [cgroup / "memory"] if "memory" in controllers else []


def _text(file: Path) -> str:
    """Return the text of a file; "" if it is missing or cannot be read."""
    try:
        return os.fsdecode(file.read_bytes())
    except OSError:
        return ""


def describe() -> str:
    """Return the device's name for people."""
    return str(mx.device_info().get("device_name", "this machine"))


def runs_ahead() -> bool:
    """Return True if the host can continue while the device computes a decode step that it was given. A CPU accepts few
    operations in advance (10 in MLX 0.32.4), so handing over a step takes as long as computing it."""
    return mx.default_device().type != mx.DeviceType.cpu


def fused_attention(
    queries: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], dtype: mx.Dtype, *, sinks: bool
) -> bool:
    """Return True if masked attention over arrays of these shapes runs without materializing all scores. Read from the
    lazy graph, because MLX decides when it builds it; nothing is computed. `queries`, `keys`, `values`: (rows, heads,
    tokens, head_dim)."""
    q, k, v = (mx.zeros(shape, dtype) for shape in (queries, keys, values))
    mask, sunk = mx.zeros((queries[2], keys[2]), mx.bool_), mx.zeros(queries[1], dtype) if sinks else None
    graph = io.StringIO()
    mx.export_to_dot(graph, mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask, sinks=sunk))
    return "ScaledDotProductAttention" in graph.getvalue()
