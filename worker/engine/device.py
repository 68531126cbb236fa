"""What the device offers: all that differs between Metal, CUDA and a CPU."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx


def memory_limit() -> int:
    """Bytes that MLX may use; what others use of them now is not taken off."""
    info = mx.device_info()
    # Metal says how much may stay on the GPU without hurting the rest, CUDA what the card has, a CPU nothing.
    for name in ("max_recommended_working_set_size", "total_memory"):
        if name in info:
            return int(info[name])
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *control_group_limits())


def memory_for_model(wanted_gb: float | None, headroom_gb: float) -> int:
    """Bytes: the wish, as far as the device offers so much, less the headroom."""
    offered = memory_limit()
    wanted = offered if wanted_gb is None else min(offered, int(wanted_gb * 1e9))
    return max(0, wanted - int(headroom_gb * 1e9))


def control_group_limits(root: Path = Path("/")) -> Iterator[int]:
    """What Linux lets a container or a service have: the limits of its group, and of those around it."""
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mounted = root / "sys/fs/cgroup" / controllers
        group = mounted / path.lstrip("/")
        # Within a container the path may be the host's name for it; then only the outermost is there.
        for folder in (group, *group.parents):
            for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                if folder.is_relative_to(mounted) and file.is_file() and (text := file.read_text().strip()) != "max":
                    yield int(text)


def describe() -> str:
    return str(mx.device_info().get("device_name", "this machine"))


def fused_attention(
    queries: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], dtype: mx.Dtype, *, sinks: bool
) -> bool:
    """Whether attention over arrays of these shapes, with a mask, runs without holding all scores at once. MLX decides
    that when it builds the graph, and there we look."""
    q, k, v = (mx.zeros(shape, dtype) for shape in (queries, keys, values))
    mask, sunk = mx.zeros((queries[2], keys[2]), mx.bool_), mx.zeros(queries[1], dtype) if sinks else None
    graph = io.StringIO()
    mx.export_to_dot(graph, mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask, sinks=sunk))
    return "ScaledDotProductAttention" in graph.getvalue()
