"""The models of a supervisor, `sluice up` with several models or `sluice worker --config`: each has a process of its
own while it is loaded. The hash `keys.models(id)` says what the supervisor has, the list `keys.model_commands(id)` what
it is asked to do."""

import json
import re
from typing import Literal, TypedDict, cast, get_args

State = Literal["unloaded", "loading", "loaded", "unloading"]


class Model(TypedDict):
    """A model of a supervisor. `unloaded`: it has no process, and takes no memory. `unloading`: it takes no more jobs,
    and ends those that it runs."""

    path: str  # a folder, or a hub id
    bytes: int  # of memory that the model, its rows and caches may take while it is loaded
    state: State
    since: float  # Unix seconds from when the state holds
    weights: int  # bytes of these that are weights
    loaded_bytes: int  # of the weights, while the model is loading; else 0
    worker: str  # the name of its worker; "" if it is unloaded
    problem: str  # why its process ended and is not back yet; "" if it did not


class Command(TypedDict):
    """Asks a supervisor to load a model, or to end its process. An unloaded model returns when a job comes."""

    do: Literal["load", "unload"]
    model: str


def is_supervisor(key: bytes) -> bool:
    """Return True for the key of a supervisor's hash, among those that `keys.MODELS` matches."""
    return re.fullmatch(rb"sluice:models:[^:]{1,200}", key) is not None


def read_model(value: bytes | str) -> Model | None:
    """Return a field of the hash; None for a foreign value, since any client of the server can write it."""
    read = {"loaded_bytes": 0, **_read(value)}  # earlier supervisors do not tell
    texts, counts = ("path", "worker", "problem"), ("bytes", "weights", "loaded_bytes")
    kinds = {"since": float | int, **dict.fromkeys(texts, str), **dict.fromkeys(counts, int)}
    fits = read.get("state") in get_args(State) and all(isinstance(read.get(name), kinds[name]) for name in kinds)
    return cast(Model, read) if fits else None


def loaded_share(model: Model) -> float:
    """Return the share of a model's weights that its load has brought into memory, from 0 to 1; 0 if it is not
    loading."""
    return min(1.0, max(0, model["loaded_bytes"]) / max(1, model["weights"]))


def read_command(value: bytes | str) -> Command | None:
    """Return a command of the list; None for a foreign value."""
    read = _read(value)
    fits = read.get("do") in ("load", "unload") and isinstance(read.get("model"), str)
    return cast(Command, read) if fits else None


def _read(value: bytes | str) -> dict[str, object]:
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
