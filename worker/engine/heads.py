"""Read the header of a weight file without reading a weight."""

import json
from collections.abc import Iterator
from pathlib import Path

from worker.schedule.memory import size


def tensor_names(file: Path) -> Iterator[str]:
    """Yield the names of all tensors in a safetensors file. Raises ValueError if it is not one or is truncated."""
    with file.open("rb") as opened:
        length, there = int.from_bytes(opened.read(8), "little"), file.stat().st_size
        if 8 + length > there:
            raise ValueError(
                f"{file.name} is not a safetensors file, or is truncated; if it is a git-lfs pointer, fetch the file"
            )
        head = json.loads(opened.read(length))
    tensors = {name: entry for name, entry in head.items() if name != "__metadata__"}
    whole = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if whole > there:
        raise ValueError(f"{file.name} is truncated: {size(there)} of {size(whole)}")
    yield from tensors
