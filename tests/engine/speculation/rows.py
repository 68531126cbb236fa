"""A row as proposers see it."""

from dataclasses import dataclass, field
from typing import Any

from worker.request import GenerationRequest


@dataclass
class PlainRow:
    request: GenerationRequest
    answer: list[int] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.request.id


def row(prompt: list[int], prediction: list[int] | None = None, id: str = "a", **fields: Any) -> PlainRow:
    return PlainRow(GenerationRequest(id, tuple(prompt), 1_000, prediction=tuple(prediction or ()), **fields))
