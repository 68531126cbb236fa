"""The parts of an engine's step."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Protocol, TypeVar

from worker.engine.active import ActiveRows
from worker.engine.isolation import isolate
from worker.outcomes import Outcome


class HasActiveRows(Protocol):
    """An engine."""

    _active: ActiveRows


E = TypeVar("E", bound=HasActiveRows)


def step_part(part: Callable[[E], Iterable[Outcome]]) -> Callable[[E], Iterable[Outcome]]:
    """Make a method of the engine a part of its step, which returns outcomes. If it fails, the outcomes so far are
    delivered, and decoding rows lose their caches at most. Rows that were lost before are recomputed first."""

    @wraps(part)
    def isolated(engine: E) -> Iterator[Outcome]:
        yield from engine._active.recover()
        with isolate("a step") as attempt:
            yield from part(engine)
        if attempt.failed:
            engine._active.lose_decoding()

    return isolated
