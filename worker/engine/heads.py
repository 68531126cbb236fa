"""What a weight file's head says, without reading a weight."""

import json
from collections.abc import Iterator
from pathlib import Path

from worker.schedule.memory import size


def tensor_names(file: Path) -> Iterator[str]:
    """Of a safetensors file. Raises ValueError for one that is none, or was cut short."""
    with file.open("rb") as opened:
        length, there = int.from_bytes(opened.read(8), "little"), file.stat().st_size
        if 8 + length > there:
            raise ValueError(f"{file.name} is no safetensors file, or only its beginning; git-lfs leaves such pointers")
        head = json.loads(opened.read(length))
    tensors = {name: entry for name, entry in head.items() if name != "__metadata__"}
    whole = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if whole > there:
        raise ValueError(f"{file.name} was cut short: {size(there)} of {size(whole)} are there")
    yield from tensors
