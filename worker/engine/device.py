"""Properties of the device: the only module that distinguishes Metal, CUDA and CPU."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx


def memory_limit() -> int:
    """Return the bytes that MLX may use. What other processes use at the moment is not subtracted."""
    info = mx.device_info()
    # Metal reports how much may stay on the GPU without slowing the system, CUDA the card's memory, a CPU nothing.
    for name in ("max_recommended_working_set_size", "total_memory"):
        if name in info:
            return int(info[name])
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *control_group_limits())


def memory_for_model(wanted_gb: float | None, headroom_gb: float) -> int:
    """Return the bytes for the model and its caches: `wanted_gb`, at most what the device offers, minus the headroom. A
    GB is 1e9 bytes."""
    offered = memory_limit()
    wanted = offered if wanted_gb is None else min(offered, int(wanted_gb * 1e9))
    return max(0, wanted - int(headroom_gb * 1e9))


def set_memory_limits(nbytes: int) -> None:
    """Let MLX release the buffers that it keeps for later use before it holds more than `nbytes` in all, and keep the
    memory of a Mac's GPU resident: macOS may otherwise page out the weights of a worker that is idle, and the next
    answer would be slow (from macOS 15 on). For the whole process, before weights are loaded."""
    mx.set_memory_limit(nbytes)
    if resident := mx.device_info().get("max_recommended_working_set_size"):
        mx.set_wired_limit(int(resident))


def control_group_limits(root: Path = Path("/")) -> Iterator[int]:
    """Yield the memory limits in bytes that Linux sets for this process: those of its control group and of its parents.
    Empty on other systems."""
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mounted = root / "sys/fs/cgroup" / controllers
        group = mounted / path.lstrip("/")
        # Inside a container the path may be the host's; then only the root group exists.
        for folder in (group, *group.parents):
            for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                if folder.is_relative_to(mounted) and file.is_file() and (text := file.read_text().strip()) != "max":
                    yield int(text)


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
