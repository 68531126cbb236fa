"""The plan of several models on one machine, as the supervisor receives it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.log_lines import LogFormat


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model, its share of the memory, and the settings of its worker."""

    name: str
    path: str  # a folder, or a hub id
    nbytes: int  # its share: weights, rows and caches
    weights: int  # bytes of these that are weights
    idle_unload_s: float | None = None  # None: never
    queue_limit: int = 10_000
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables of its worker; the URL is among them


@dataclass(frozen=True, slots=True)
class Plan:
    """What all models together may take, and each one's share of it."""

    redis_url: str = field(repr=False)
    log_level: str
    log_format: LogFormat
    budget: int  # bytes
    models: tuple[PlannedModel, ...]

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> "Plan":
        """Return the plan that was written as JSON."""
        return cls(**{**written, "models": tuple(PlannedModel(**each) for each in written["models"])})
