"""Training state in one file: a resumed run ends with the weights of an uninterrupted one."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from models.training.plan import Plan, Size

Tree = dict[str, Any]  # of arrays
_Loaded = tuple[dict[str, mx.array], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State of a run after `done` steps."""

    plan: Plan
    done: int  # steps
    parameters: Tree
    optimizer: Tree


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: a run that is killed meanwhile keeps the earlier one."""
    arrays = _flat("network", checkpoint.parameters) | _flat("optimizer", checkpoint.optimizer)
    about = {**asdict(checkpoint.plan), "done": checkpoint.done}
    unfinished = path.with_name(f"unfinished-{path.name}")
    mx.save_safetensors(str(unfinished), arrays, {name: str(value) for name, value in about.items()})
    unfinished.replace(path)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint."""
    arrays, about = cast(_Loaded, mx.load(str(path), return_metadata=True))
    plan = Plan(cast(Size, about["size"]), int(about["steps"]), int(about["seed"]))
    return Checkpoint(plan, int(about["done"]), _tree("network", arrays), _tree("optimizer", arrays))


def _flat(prefix: str, tree: Tree) -> dict[str, mx.array]:
    return {f"{prefix}.{name}": value for name, value in tree_flatten(tree)}


def _tree(prefix: str, arrays: dict[str, mx.array]) -> Tree:
    tree: Tree = tree_unflatten(list(arrays.items()))[prefix]
    return tree
