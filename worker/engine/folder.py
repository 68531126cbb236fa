"""A model's folder: what its files say, and the code that it may bring along."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from worker.errors import CannotStart

_SAID_IN = "config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """By a file of JSON; nothing where it is not there."""
    file = folder / name
    return json.loads(file.read_text()) if file.is_file() else {}


def is_path(path_or_hub_id: str) -> bool:
    """True if no hub can have it: an id there is one name or two."""
    return path_or_hub_id.startswith((".", "/", "~")) or path_or_hub_id.endswith("/") or path_or_hub_id.count("/") > 1


def similar_folder(path: str) -> Path | None:
    """Return the folder beside the missing one that is probably meant."""
    missing = Path(path).expanduser()
    try:
        there = [each.name for each in missing.parent.iterdir() if each.is_dir()]
    except OSError:
        return None
    meant = get_close_matches(missing.name, there, n=1)
    return missing.parent / meant[0] if meant else None


def refuse_code(folder: Path, *fields: str) -> None:
    """Where one of these names some. Raises `CannotStart`."""
    for name in _SAID_IN:
        for field in fields:
            if named := read_json(folder, name).get(field):
                raise CannotStart(
                    f"{folder / name} names code of its own ({field}: {json.dumps(named)}), which would run on this "
                    "machine. Where you trust it, allow it with SLUICE_TRUST_MODEL_CODE=true."
                )
