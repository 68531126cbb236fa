"""Rows that decode, as a planner of steps sees them."""

from dataclasses import dataclass

DECODE_S = 0.09


@dataclass
class Running:
    """By default one, which takes most of a step of 0.1 s."""

    copied: int = 0  # bytes, when another joins
    num_interactive: int = 1
    started: bool = True
    step_s: float = DECODE_S
    added_s: float = 0.0  # to that, once another has joined
    step_copy_bytes: int = 0
    rows: int = 1
    most_measured: int = 32  # rows

    def __len__(self) -> int:
        return self.rows

    def join_copy_bytes(self, length: int) -> int:
        return self.copied

    def added_step_s(self, length: int) -> float:
        return self.added_s
