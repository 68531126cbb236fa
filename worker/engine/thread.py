"""The one thread that owns the model, and its face to the event loop.

MLX streams, lazy arrays and random state belong to a thread, so loading, computing and tearing down happen
here. The loop sends commands through a mailbox and hears back once a step.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import mlx.core as mx

from worker.engine.engine import Engine
from worker.engine.model import Model
from worker.pulse import Pulse
from worker.schedule.memory import MOST_ROWS
from worker.schedule.sequence import Listener, Sequence, StepReport

logger = logging.getLogger("sluice.engine")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Add:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class _Remove:
    id: str


@dataclass(frozen=True, slots=True)
class _Hold:
    on: bool


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineThread:
    """All methods are for the event loop's thread."""

    def __init__(
        self,
        load: Callable[[], Model],
        *,
        step_s: float,
        rows: int = MOST_ROWS,
        memory: int | None = None,
        prefix_bytes: int | None = None,
        died: Callable[[], None],
        stepped: Callable[[StepReport], None] = lambda report: None,
    ) -> None:
        self._load = load
        self._engine_of = partial(Engine, step_s=step_s, rows=rows, memory=memory, prefix_bytes=prefix_bytes)
        self._died, self._stepped = died, stepped
        self._loop = asyncio.get_running_loop()
        self._mailbox: queue.SimpleQueue[_Add | _Remove | _Hold | _Stop] = queue.SimpleQueue()
        self._held = False
        self.pulse = Pulse("engine")
        self._listeners: dict[str, Listener] = {}
        self._loaded: asyncio.Future[Model] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name="engine")

    async def start(self) -> Model:
        """Loads the model. Raises what loading raised."""
        self._thread.start()
        return await self._loaded

    async def stop(self) -> None:
        self._mailbox.put(_Stop())
        await asyncio.to_thread(self._thread.join)

    def submit(self, sequence: Sequence, listener: Listener) -> None:
        self._listeners[sequence.id] = listener
        self._mailbox.put(_Add(sequence))

    def remove(self, sequence_id: str) -> None:
        """The listener hears no more, from now on; the row is free after the step under way."""
        if self._listeners.pop(sequence_id, None) is not None:
            self._mailbox.put(_Remove(sequence_id))

    def hold(self, on: bool) -> None:
        """Compute nothing while nobody can take the tokens."""
        self._mailbox.put(_Hold(on))

    def _has_loaded(self, model: Model) -> None:
        if not self._loaded.done():  # cancelled by a signal that came meanwhile
            self._loaded.set_result(model)

    def _deliver(self, report: StepReport) -> None:
        self._stepped(report)
        for outcome in report.outcomes:
            if listener := self._listeners.get(outcome.id):
                listener.heard(outcome, report.rows)

    # On the engine's own thread

    def _main(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # the border of the thread: nobody else would hear of it
            self._tell(self._end, error)
        finally:
            # A thread that leaves its streams behind aborts the process at exit (mlx 0.32.4).
            mx.synchronize()
            mx.clear_streams()

    def _serve(self) -> None:
        model = self._load()
        engine = self._engine_of(model)
        self._tell(self._has_loaded, model)
        while self._obey(engine):
            self.pulse.beat()
            self._tell(self._deliver, engine.step())

    def _obey(self, engine: Engine) -> bool:
        """Empty the mailbox; with nothing to compute, sleep on it. False ends the thread."""
        while not self._mailbox.empty() or self._held or not len(engine):
            self.pulse.rest()
            match self._mailbox.get():
                case _Hold(on):
                    self._held = on
                case _Add(sequence):
                    engine.add(sequence)
                case _Remove(id):
                    engine.remove(id)
                case _Stop():
                    return False
        return True

    def _tell(self, call: Callable[[T], object], value: T) -> None:
        self._loop.call_soon_threadsafe(call, value)

    def _end(self, error: BaseException) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(error)
        else:
            logger.critical("the engine thread died", exc_info=error)
            self._died()
