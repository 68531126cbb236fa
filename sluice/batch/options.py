"""Inputs of a run: its files and its options."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from sluice.batch import names
from sluice.errors import BatchRefused

WINDOW = 256  # lines: more than a worker has rows, so that the next ones wait where it finds them

DEFAULT_WINDOW = "24h"

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of a run. Raises ValueError if two are the same."""

    input: Path
    output: Path
    errors: Path
    state: Path

    def __post_init__(self) -> None:
        if len({path.resolve() for path in (self.input, self.output, self.errors, self.state)}) < 4:
            raise ValueError("input, output and errors must be files of their own, not twice the same")

    @classmethod
    def beside(cls, input: Path, output: Path, errors: Path | None = None) -> Self:
        """All that is not named lies beside the output: out.jsonl has out.errors.jsonl and out.jsonl.run."""
        if not output.name:
            raise ValueError(f"output: {output} is a folder; name a file")
        failed = errors or output.with_name(f"{output.name.removesuffix('.jsonl')}.errors.jsonl")
        state = output.with_name(f"{output.name}.run")
        return cls(input.absolute(), output.absolute(), failed.absolute(), state.absolute())

    def refuse_to_overwrite(self) -> None:
        """Raises `BatchRefused` if a result file has contents or is not a regular file; for a new run."""
        for path in (self.output, self.errors):
            if path.is_symlink() and not path.exists():
                raise BatchRefused(f"{path} is a link to nothing: name another, or remove it")
            if path.exists() and (not path.is_file() or path.stat().st_size):
                raise BatchRefused(f"{path} is there already, and not of this run: name another, or remove it")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run; None keeps the value of a resumed run, else the default. Raises ValueError."""

    models: Mapping[str, str] | None = None  # by the names in the file
    completion_window: str | None = None  # 24h
    metadata: Mapping[str, str] | None = None
    window: int = WINDOW  # lines of one model that are queued or running at once
    id: str = field(default_factory=names.new_run)  # of a new run
    served_only: bool = False  # refuse a file for a model that nobody serves, if others are served
    names_expected: bool = False  # report the names of `models` that no line has

    def __post_init__(self) -> None:
        parse_window(self.completion_window or DEFAULT_WINDOW)
        if self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}")


def parse_window(window: str) -> int:
    """Return the seconds of a completion window such as 24h. Raises ValueError."""
    found = re.fullmatch(r"([1-9]\d{0,8})([smhd])", window, re.ASCII)
    if found is None:
        raise ValueError(f"a completion window is a number of s, m, h or d, such as 24h, and {window!r} is none")
    return int(found[1]) * _UNITS_S[found[2]]
