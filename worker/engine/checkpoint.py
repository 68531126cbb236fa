"""Read the JSON files of a model's folder, and refuse code that it brings along."""

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from worker.engine.memory import format_bytes
from worker.errors import CannotStart

_CONFIG_FILES = "config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file in the folder; empty if there is no such file. Raises ValueError if it is not
    JSON."""
    file = folder / name
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def is_path(path_or_hub_id: str) -> bool:
    """Return True if the name can only be a local path: a hub id has at most one slash."""
    return path_or_hub_id.startswith((".", "/", "~")) or path_or_hub_id.endswith("/") or path_or_hub_id.count("/") > 1


def similar_folder(path: str) -> Path | None:
    """Return the sibling of a missing folder with the most similar name, or None. Blocks on the file system."""
    missing = Path(path).expanduser()
    try:
        siblings = [each.name for each in missing.parent.iterdir() if each.is_dir()]
    except OSError:
        return None
    similar = get_close_matches(missing.name, siblings, n=1)
    return missing.parent / similar[0] if similar else None


def refuse_code(folder: Path, *fields: str) -> None:
    """Raise `CannotStart` if one of these fields in a JSON file of the folder names Python code."""
    for name in _CONFIG_FILES:
        for field in fields:
            if named := read_json(folder, name).get(field):
                raise CannotStart(
                    f"{folder / name} names Python code ({field}: {json.dumps(named)}) that would run on this machine. "
                    "If you trust it, allow it with SLUICE_TRUST_MODEL_CODE=true."
                )


def tensor_names(file: Path) -> Iterator[str]:
    """Yield the names of all tensors in a safetensors file. Raises ValueError if it is not one or is truncated."""
    yield from tensor_shapes(file)


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a safetensors file by name, from its header. Raises ValueError if it is not
    one or is truncated."""
    with file.open("rb") as opened:
        length, size = int.from_bytes(opened.read(8), "little"), file.stat().st_size
        if 8 + length > size:
            raise ValueError(
                f"{file.name} is not a safetensors file, or is truncated; if it is a git-lfs pointer, fetch the file"
            )
        header = json.loads(opened.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    expected = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if expected > size:
        raise ValueError(f"{file.name} is truncated: {format_bytes(size)} of {format_bytes(expected)}")
    return {name: tuple(entry["shape"]) for name, entry in tensors.items()}
