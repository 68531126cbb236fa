"""What this worker serves, as its jobs see it."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from worker.metrics import Metrics
from worker.reading.reader import Reader
from worker.schedule.sequence import Listener, Sequence
from worker.settings import Settings
from worker.sights import Sights
from worker.text.language import Language


class Engine(Protocol):
    def submit(self, sequence: Sequence, listener: Listener) -> None:
        """Under an id that was never used before."""

    def remove(self, sequence_id: str) -> None:
        """Of a sequence in any state, or one that has ended: the row is free, the listener hears no more."""


@dataclass(frozen=True, slots=True)
class Served:
    settings: Settings
    engine: Engine
    language: Language
    sights: Sights | None  # where the model sees images
    fingerprint: str
    context: int  # tokens, prompt and answer together
    vocab: int
    generation: dict[str, Any]  # the model's own sampling defaults
    metrics: Metrics
    reader: Reader = field(default_factory=Reader)
