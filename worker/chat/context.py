"""The objects of a worker that its jobs use."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from worker.bounded_json.reader import BodyReader
from worker.images.conversation import ImageInputs
from worker.monitoring.sink import MetricsSink
from worker.outcomes import OutcomeListener
from worker.request import GenerationRequest
from worker.settings import Settings
from worker.text.codec import TextCodec


class _Engine(Protocol):
    """The engine thread's interface for jobs."""

    def submit(self, request: GenerationRequest, listener: OutcomeListener) -> None:
        """Submit a request. Its id must never have been used before."""

    def remove(self, request_id: str) -> None:
        """Remove a request in any state; one that has ended is ignored. Its listener is no longer called."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Objects and figures that all jobs of a worker share."""

    settings: Settings
    engine: _Engine
    codec: TextCodec
    images: ImageInputs | None  # None for a text model
    fingerprint: str
    context_tokens: int  # prompt and answer together
    vocab_size: int
    generation: dict[str, Any]  # the model's own sampling defaults
    end_tokens: frozenset[int]  # that end an answer
    metrics: MetricsSink
    reader: BodyReader = field(default_factory=BodyReader)
    loading: tuple[float, float] = (0.0, 0.0)  # from the worker's start until its model was loaded, monotonic seconds
