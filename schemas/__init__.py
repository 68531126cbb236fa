"""The contract, version 1, as pydantic models. `docs/contract.md` explains it."""

from schemas.batch import BatchLine, BatchOutput
from schemas.chat import ChatRequest
from schemas.events import FinalEvent, JobEvent
from schemas.explain import explain, field_of
from schemas.result import ChatCompletion, CountResult
from sluice.contract.batch import Batch

CONTRACT_VERSION = 1

__all__ = [
    "CONTRACT_VERSION",
    "Batch",
    "BatchLine",
    "BatchOutput",
    "ChatCompletion",
    "ChatRequest",
    "CountResult",
    "FinalEvent",
    "JobEvent",
    "explain",
    "field_of",
]
