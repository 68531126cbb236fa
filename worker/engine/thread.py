"""The one thread that owns the model, and its interface to the event loop.

MLX streams, lazy arrays and random state belong to a thread, so loading, computing and tear-down happen here. The event
loop sends commands through a mailbox, and receives a report after each step."""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from worker.engine.engine import Engine
from worker.engine.model.load import Model
from worker.engine.options import EngineOptions
from worker.engine.prefix.disk import DiskPrefixes, Storing
from worker.engine.speculation.copies import CopyProposer
from worker.engine.speculation.draft_model import DraftModelProposer
from worker.engine.speculation.forced import GrammarProposer
from worker.engine.speculation.mtp import HeadProposer
from worker.engine.speculation.speculator import Speculator
from worker.engine.step.cost import StepTimes
from worker.engine.upstream.streams import clear_streams
from worker.host.courtesy import Throttle
from worker.monitoring.health import Heartbeat
from worker.outcomes import OutcomeListener, StepReport, StoreResult
from worker.prefix_store.store import StoreOptions
from worker.request import EmbeddingInputs, GenerationRequest

logger = logging.getLogger("sluice.engine")

T = TypeVar("T")
M = TypeVar("M")
Request = GenerationRequest | EmbeddingInputs


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request


@dataclass(frozen=True, slots=True)
class _Remove:
    id: str


@dataclass(frozen=True, slots=True)
class _SetPaused:
    on: bool


@dataclass(frozen=True, slots=True)
class _SetThrottle:
    throttle: Throttle


@dataclass(frozen=True, slots=True)
class _StorePrefix:
    namespace: str
    tokens: tuple[int, ...]
    attempt: Storing | None
    result: "asyncio.Future[StoreResult | Storing]"


@dataclass(frozen=True, slots=True)
class _Wake:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    """Ends the thread."""


_Command = _Add | _Remove | _SetPaused | _SetThrottle | _StorePrefix | _Wake | _Stop


class _Computes(Protocol):
    """What the thread drives: an `Engine`, or that of an embedding model, whose members are the same."""

    def __len__(self) -> int: ...

    @property
    def needs_step(self) -> bool: ...

    @property
    def share(self) -> float: ...

    def set_throttle(self, throttle: Throttle) -> None: ...

    def add(self, request: Any) -> None: ...

    def remove(self, id: str) -> None: ...

    def store_prefix(
        self, namespace: str, tokens: tuple[int, ...], attempt: Storing | None = None
    ) -> StoreResult | Storing: ...

    def step(self) -> StepReport: ...

    def close(self) -> None: ...


class EngineThread(Generic[M]):
    """Starts and feeds the engine's thread. All methods but `wake` are for the event loop's thread."""

    def __init__(
        self,
        load: Callable[[], M],
        options: EngineOptions,
        *,
        on_failure: Callable[[], None],
        on_step: Callable[[StepReport], None] = lambda report: None,
        engine_of: "Callable[[M], _Computes] | None" = None,
    ) -> None:
        """`load`: load the model; runs on the new thread, as does `engine_of`, which returns what computes with it; by
        default an `Engine`, for a `Model`. `on_failure` is called if the thread fails after loading,
        `on_step` with the report of each step; both run on the event loop. Must be created while the loop runs."""
        self._load = load
        self._options = options
        self._on_failure, self._on_step = on_failure, on_step
        self._engine_of = engine_of or self._generating
        self._loop = asyncio.get_running_loop()
        self._mailbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._paused = False
        self._last_step = 0.0, 0.0  # its end, monotonic, and its seconds
        self.heartbeat = Heartbeat("engine")
        self._step_times = StepTimes()
        self._prompt_cost, self._marks = (0.0, 0.0), 0
        self._lost, self._emptied = deque[str](maxlen=20_000), False  # as many as a tree has; the oldest expire soon
        self._listeners: dict[str, OutcomeListener] = {}
        self._loaded: asyncio.Future[M] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name="engine")

    async def start(self) -> M:
        """Start the thread, and wait until the model is loaded. Raises what loading raised."""
        self._thread.start()
        return await self._loaded

    async def stop(self) -> None:
        """Ask the thread to end, and wait until the running step is done and the thread has ended."""
        self._mailbox.put(_Stop())
        await asyncio.to_thread(self._thread.join)

    def submit(self, request: Request, listener: OutcomeListener) -> None:
        """Submit a request. The listener receives its outcomes on the event loop until it is removed."""
        self._listeners[request.id] = listener
        self._mailbox.put(_Add(request))

    def remove(self, request_id: str) -> None:
        """Remove a request. Its listener receives nothing from now on; its row is freed after the running step. An
        unknown id is ignored."""
        if self._listeners.pop(request_id, None) is not None:
            self._mailbox.put(_Remove(request_id))

    def set_paused(self, on: bool) -> None:
        """Pause computing while tokens cannot be delivered, or continue. Requests are added and removed in the pause
        too."""
        self._mailbox.put(_SetPaused(on))

    def set_throttle(self, throttle: Throttle) -> None:
        """Set what the engine leaves to others on its machine."""
        self._mailbox.put(_SetThrottle(throttle))

    def wake(self) -> None:
        """Let the engine compute a prompt that has become ready: see `Stage.ready`. May be called on any thread."""
        self._mailbox.put(_Wake())

    def prompt_cost(self) -> tuple[float, float]:
        """Return the measured seconds of a prompt's token, and of each pair of a token and one before it; 0 before the
        first prompt."""
        return self._prompt_cost

    def marks(self) -> int:
        """Return the number of marks whose prefixes the prefix cache holds: see `PrefixTree`."""
        return self._marks

    def take_lost(self) -> tuple[list[str], bool]:
        """Return the marks that the prefix cache has lost since the last call, and True if it has lost all prefixes."""
        lost, emptied = [*self._lost], self._emptied
        self._lost.clear()
        self._emptied = False
        return lost, emptied

    def step_times(self) -> tuple[float, ...]:
        """Return the seconds of decode steps by their rows, as `StepTimes`."""
        return self._step_times.seconds(time.monotonic())

    async def store_prefix(self, namespace: str, tokens: tuple[int, ...]) -> StoreResult:
        """Write the cached prefix of these tokens to disk, if prefixes are stored there, and never remove it for space.
        Waits until it is written, or refused."""
        attempt: Storing | None = None
        while True:
            result: asyncio.Future[StoreResult | Storing] = self._loop.create_future()
            self._mailbox.put(_StorePrefix(namespace, tokens, attempt, result))
            match await result:
                case StoreResult() as stored:
                    return stored
                case Storing() as attempt:
                    await asyncio.sleep(0.05)  # until the writer may take more, or has written all

    def _has_loaded(self, model: M) -> None:
        if not self._loaded.done():  # cancelled by a signal that came meanwhile
            self._loaded.set_result(model)

    def _deliver(self, report: StepReport) -> None:
        self._step_times.observe(*report.decode, time.monotonic())
        self._prompt_cost, self._marks = report.prompt_cost, report.prefix.marks
        self._lost.extend(report.prefix.lost)
        self._emptied |= report.prefix.emptied
        self._on_step(report)
        for outcome in report.outcomes:
            if listener := self._listeners.get(outcome.id):
                listener(outcome, report.rows)

    # On the engine's thread

    def _main(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # the border of the thread: nothing else would report the error
            self._post(self._end, error)
        finally:
            clear_streams()

    def _serve(self) -> None:
        model = self._load()
        engine = self._engine_of(model)
        self._post(self._has_loaded, model)
        while self._handle_commands(engine):
            self.heartbeat.beat()
            report = engine.step()
            self._post(self._deliver, report)
            self._last_step = time.monotonic(), report.seconds
        engine.close()

    def _generating(self, model: object) -> _Computes:
        assert isinstance(model, Model), "a model of another kind has an engine of its own"
        speculator = speculator_of(model) if self._options.speculation else None
        open_disk = partial(self._open_disk, self._options.disk) if self._options.disk else None
        return Engine(model, self._options, speculator=speculator, open_disk=open_disk)

    def _open_disk(self, disk: StoreOptions, model: Model) -> DiskPrefixes:
        bits, token_bytes = self._options.disk_bits, model.costs.token_bytes
        return DiskPrefixes(model.network, model.cache_fingerprint, disk, self.wake, bits=bits, token_bytes=token_bytes)

    def _handle_commands(self, engine: _Computes) -> bool:
        """Handle the commands in the mailbox; block on it if there is nothing to compute. Returns False to
        end the thread."""
        while not self._mailbox.empty() or self._paused or not engine.needs_step or self._rest_s(engine) > 0:
            self.heartbeat.pause()
            match self._next_command(engine):
                case _SetPaused(on):
                    self._paused = on
                case _SetThrottle(throttle):
                    engine.set_throttle(throttle)
                case _Add(request):
                    engine.add(request)
                case _Remove(id):
                    engine.remove(id)
                case _StorePrefix(namespace, tokens, attempt, result):
                    self._post(partial(_settle, result), engine.store_prefix(namespace, tokens, attempt))
                case _Wake():
                    pass  # the engine is asked again if it needs a step
                case _Stop():
                    return False
        return True

    def _next_command(self, engine: _Computes) -> _Command:
        """Return the next command, or `_Wake` after a while if active rows wait, which may give up waiting, and after a
        rest."""
        waits = (len(engine) > 0 or engine.needs_step) and not self._paused
        rest_s = self._rest_s(engine) if waits and engine.needs_step else 0.05  # until they are checked again
        try:
            return self._mailbox.get(timeout=max(0.0, rest_s) if waits else None)
        except queue.Empty:
            return _Wake()

    def _rest_s(self, engine: _Computes) -> float:
        """Return the seconds that the device still rests after the last step, by the engine's share of the time."""
        ended, step_s = self._last_step
        return ended + step_s * (1 / engine.share - 1) - time.monotonic()

    def _post(self, call: Callable[[T], object], value: T) -> None:
        self._loop.call_soon_threadsafe(call, value)

    def _end(self, error: BaseException) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(error)
        else:
            logger.critical("engine thread failed", exc_info=error)
            self._on_failure()


def _settle(result: "asyncio.Future[T]", value: T) -> None:
    if not result.done():  # cancelled meanwhile
        result.set_result(value)


def speculator_of(model: Model) -> Speculator:
    """Return the speculator of an engine for this model, which offers what a grammar leaves no choice about, copies of
    prompt, answer and prediction, and drafts of the model's MTP head and of its draft model. It drafts nothing if the
    model's rows take no drafts."""
    drafting = model.drafting
    return Speculator(
        [CopyProposer(), GrammarProposer()],
        head=HeadProposer(model.head) if model.head else None,
        draft=DraftModelProposer(model.drafter) if model.drafter else None,
        max_draft=drafting.max_draft,
        recurrence=drafting.recurrence(model.network),
        eos_ids=model.tokenizer.eos_token_ids,
    )
