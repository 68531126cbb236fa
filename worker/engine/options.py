"""What the operator decides about the engine: `Settings.engine_options` fills it, and each part reads its own field."""

from dataclasses import dataclass

from worker.engine.memory import MAX_ROWS
from worker.prefix_store.store import StoreOptions


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an engine and of its thread."""

    step_s: float  # target seconds of a step
    rows: int = MAX_ROWS  # most rows active at once; an interactive one may preempt an offline one
    memory: int | None = None  # bytes that weights, rows and caches may take together; None: what the device offers
    # Most bytes of the caches that outlive a request, as far as rows leave them. 0 disables these caches, None is a
    # share of the memory that the weights leave.
    prefix_bytes: int | None = None
    disk: StoreOptions | None = None  # where prefixes are stored; None: nowhere
    disk_bits: int | None = None  # of their keys and values there; None: they are stored exactly
    speculation: bool = False  # verify drafts
    pipelined: bool | None = None  # the device computes a step while the host continues; None: ask the device
