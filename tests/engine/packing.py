"""A plan that packs whatever can be packed, in place of the one that weighs costs."""

from collections.abc import Iterable, Iterator

import pytest

from worker.engine.step import planner
from worker.engine.step.cost import Forward, PromptChunk
from worker.engine.step.plan import PromptState, StepLimits

CHUNKS = (5, 16, 3, 30)  # tokens, by step


def pack_everything(patch: pytest.MonkeyPatch) -> list[Forward]:
    """Have all prompts advance in every step, packed if possible. Returns the forwards, as they are planned."""
    planned = list[Forward]()

    def plan(
        waiting: Iterable[PromptState], limits: StepLimits, step: int, longest: int, **rules: object
    ) -> list[Forward]:
        forwards = [*_forwards([*waiting], CHUNKS[step % len(CHUNKS)])]
        planned.extend(forwards)
        return forwards

    patch.setattr(planner, "plan", plan)
    return planned


def _forwards(waiting: list[PromptState], most: int) -> Iterator[Forward]:
    for pack in {row.pack for row in waiting if row.remaining} - {None}:
        rows = [row for row in waiting if row.pack == pack and row.remaining]
        lengths = [min(most, _uncut(row)) for row in rows]
        padded = all(row.padded for row in rows)
        yield Forward(
            tuple(_chunk(row, tokens if padded else min(lengths)) for row, tokens in zip(rows, lengths, strict=True))
        )
    for row in waiting:
        if row.pack is None or not row.remaining:
            yield Forward((_chunk(row, min(most, row.remaining)),))


def _chunk(row: PromptState, tokens: int) -> PromptChunk:
    return PromptChunk(row.id, tokens, joins=tokens == row.remaining)


def _uncut(row: PromptState) -> int:
    """Return the tokens until the next cut, or the end."""
    return min(cut - row.done for cut in (*row.cuts, row.done + row.remaining) if cut > row.done)
