"""The contract, version 1, as pydantic models. `docs/contract.md` explains it."""

from schemas.chat import ChatRequest
from schemas.embeddings import EmbeddingRequest
from schemas.explain import explain, field_of
from schemas.outputs import BatchLine, BatchOutput, ChatCompletion, CountResult, EmbeddingResult, FinalEvent, JobEvent
from sluice.contract.batch import Batch

__all__ = [
    "Batch",
    "BatchLine",
    "BatchOutput",
    "ChatCompletion",
    "ChatRequest",
    "CountResult",
    "EmbeddingRequest",
    "EmbeddingResult",
    "FinalEvent",
    "JobEvent",
    "explain",
    "field_of",
]
