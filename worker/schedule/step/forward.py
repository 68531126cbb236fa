"""What a step computes besides decoding."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that one prompt advances by in a step."""

    id: str
    tokens: int
    joins: bool = False  # prefill is finished with this chunk, and the row joins the decoding rows


@dataclass(frozen=True, slots=True)
class Forward:
    """Chunks that are computed together. Several chunks belong to prompts with the same `pack`, have at least one token
    and, unless these are `padded`, the same number of tokens. None of them crosses a cut of its prompt, although it may
    end at one."""

    chunks: tuple[Chunk, ...]
    seconds: float = 0.0  # expected, with the joins of its rows and the time that these add to the decode step


@dataclass(frozen=True, slots=True)
class StepKind:
    """What the time of a step depends on. Steps of one kind may be underestimated alike."""

    joins: bool = False  # rows join the decoding ones
    shared: bool = False  # several prompts share a forward


PLAIN_STEP = StepKind()


def step_kind(forwards: Sequence[Forward]) -> StepKind:
    """Return the kind of a step that computes these forwards."""
    joins = any(chunk.joins for forward in forwards for chunk in forward.chunks)
    return StepKind(joins, shared=any(len(forward.chunks) > 1 for forward in forwards))
