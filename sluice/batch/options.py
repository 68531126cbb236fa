"""Inputs of a run: its files and its options."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from sluice.contract.batch import new_run_id
from sluice.errors import BatchRefused

WINDOW = 256  # lines; more than a worker has rows, so that its next jobs are already queued

DEFAULT_WINDOW = "24h"

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of a run. Raises ValueError if two of them are the same."""

    input: Path
    output: Path
    errors: Path
    state: Path

    def __post_init__(self) -> None:
        if len({path.resolve() for path in (self.input, self.output, self.errors, self.state)}) < 4:
            raise ValueError("input, output and errors must be different files")

    @classmethod
    def next_to_output(cls, input: Path, output: Path, errors: Path | None = None) -> Self:
        """Return the paths of a run. The error file and the state file are next to the output if not given: for
        out.jsonl, out.errors.jsonl and out.jsonl.run. Raises ValueError if the output names no file."""
        if not output.name:
            raise ValueError(f"output: {output} is a folder; give the path of a file")
        failed = errors or output.with_name(f"{output.name.removesuffix('.jsonl')}.errors.jsonl")
        state = output.with_name(f"{output.name}.run")
        return cls(input.absolute(), output.absolute(), failed.absolute(), state.absolute())

    def refuse_to_overwrite(self) -> None:
        """Check that a new run overwrites nothing. Raises `BatchRefused` if a result file is not empty, is a broken
        link, or is not a regular file."""
        for path in (self.output, self.errors):
            if path.is_symlink() and not path.exists():
                raise BatchRefused(f"{path} is a broken link: give another path, or remove it")
            if path.exists() and (not path.is_file() or path.stat().st_size):
                raise BatchRefused(
                    f"{path} already exists, and is not a file of this run: give another path, or remove it"
                )


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run. None keeps the value of a resumed run, and is the default for a new one.

    Raises ValueError for a bad completion window, or a window below 1.
    """

    models: Mapping[str, str] | None = None  # served names by the names in the file; None: unchanged
    completion_window: str | None = None  # by default 24h
    metadata: Mapping[str, str] | None = None
    window: int = WINDOW  # lines of one model that are queued or running at once
    id: str = field(default_factory=new_run_id)  # used for a new run only
    served_only: bool = False  # refuse a file for a model without a worker, if other models have one
    models_from_setting: bool = False  # `models` is SLUICE_BATCH_MODELS, which is meant for many files

    def __post_init__(self) -> None:
        parse_window(self.completion_window or DEFAULT_WINDOW)
        if self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}")


def parse_window(window: str) -> int:
    """Return the seconds of a completion window such as 24h. Raises ValueError."""
    found = re.fullmatch(r"([1-9]\d{0,8})([smhd])", window, re.ASCII)
    if found is None:
        raise ValueError(f"completion_window: {window!r} is not a number with a unit s, m, h or d, such as 24h")
    return int(found[1]) * _UNITS_S[found[2]]
