"""A simulated request."""

from dataclasses import dataclass, field

from scripts.simulation.arrivals import Arrival


@dataclass(slots=True, eq=False)
class Request:
    """A request in the simulation, and what its client has received."""

    id: str
    arrival: Arrival
    admitted_s: float = 0.0
    done: int = 0  # prompt tokens computed, of `total`
    joined_s: float = 0.0
    started: bool = False  # a decode step has begun to draw its first token
    token_times_s: list[float] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Prompt tokens to prefill: all but the last, which the row is fed when it decodes."""
        return self.arrival.prompt - 1
