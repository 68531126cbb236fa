"""A worker whose engine makes a token at fixed intervals; all else is real: `python -m tests.support.chaos.paced`.

PACED_STEP_MS is the time between two tokens. Token k of every row is k, and its text is " tk". A message may request
a fault: "poison N" kills the process at token N, "block S" blocks the event loop for S seconds at token 5.
"""

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from arq.worker import func

from sluice.log_lines import set_up_logging
from worker.app import served_metrics
from worker.chat.context import WorkerContext
from worker.engine.step.tuning import CLASSES
from worker.jobs import chat
from worker.monitoring.health import Health
from worker.outcomes import OutcomeListener, Sampled
from worker.process.daemon import execute_again
from worker.queue.job.runner import JobFunctions
from worker.queue.redis_server import RedisServer, redis_from_settings
from worker.queue.worker import QueueWorker, ServedModel
from worker.request import GenerationRequest
from worker.settings import Settings, read_settings
from worker.text.codec import TextCodec
from worker.text.tokenizer import TemplateMessages

_FAULTS = {"poison": 1_000_000, "block": 2_000_000}  # added to the number, in the first token of the prompt


class PacedDetokenizer:
    """Detokenizer of the paced model."""

    def feed(self, token: int) -> str:
        """Return the text of token k, " tk"."""
        return f" t{token}"

    def flush(self) -> str:
        """Return "": no text is held back."""
        return ""


class NoControlTokens:
    """Control tokens of a model that has none."""

    def found_in(self, text: str) -> bool:
        """Return False: no text is a control token."""
        return False

    def mark(self, text: str) -> str:
        """Return the text unchanged; `unmark` does the same."""
        return text

    unmark = mark

    def encode(self, text: str) -> list[int]:
        """Never called, since no text is marked."""
        raise NotImplementedError("nothing was marked")


class PacedTokenizer:
    """Tokenizer of the paced model: encodes only the fault that the last message requests."""

    byte_level = False
    encode_literally = None
    added_tokens: ClassVar[dict[str, int]] = {}
    template = ""
    eos_token_ids = frozenset[int]()
    think = tool = None
    control_tokens = NoControlTokens()
    tokens: ClassVar[list[str]] = [f" t{k}" for k in range(100_000)]  # no answer is longer

    def streaming(self) -> PacedDetokenizer:
        """Return a detokenizer for one answer."""
        return PacedDetokenizer()

    def render(
        self, conversation: TemplateMessages, *, tools: list[dict[str, Any]], continues: bool,
        variables: dict[str, Any], images: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Return the text of the last message."""
        return str(conversation[-1]["content"])

    def encode(self, text: str) -> list[int]:
        """Return one token: the fault that the text requests with its number, or 1 for no fault."""
        words = text.split()
        mark = _FAULTS.get(words[0], 0) if words else 0
        return [mark + int(words[1]) if mark else 1]


def expected_text(tokens: int) -> str:
    """Return the text of an answer of this many tokens."""
    return "".join(f" t{k}" for k in range(tokens))


class PacedEngine:
    """Samples token k of every row each `step_s` seconds, in the event loop."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._rows: dict[str, tuple[GenerationRequest, OutcomeListener]] = {}
        self._next: dict[str, int] = {}
        self._paused, self._work = False, asyncio.Event()

    def submit(self, sequence: GenerationRequest, listener: OutcomeListener) -> None:
        """Add a row, which continues after its `resume_tokens`. Its listener receives every token."""
        self._rows[sequence.id] = sequence, listener
        self._next[sequence.id] = len(sequence.resume_tokens)
        self._work.set()

    def remove(self, sequence_id: str) -> None:
        """Remove a row; an unknown id is ignored. Rows that have reached `max_tokens` must be removed too."""
        self._rows.pop(sequence_id, None)
        self._next.pop(sequence_id, None)

    def set_paused(self, on: bool) -> None:
        """Pause sampling, or continue."""
        self._paused = on

    async def run(self) -> None:
        """Sample until cancelled; waits while there are no rows."""
        while True:
            if not self._rows:
                self._work.clear()
                await self._work.wait()
            began = time.perf_counter()
            if not self._paused:
                self._step()
            await asyncio.sleep(max(0.0, self._step_s - (time.perf_counter() - began)))

    def _step(self) -> None:
        rows = len(self._rows)
        for id, (sequence, listener) in list(self._rows.items()):
            k = self._next[id]
            _inject_fault(sequence.prompt[0], k)
            self._next[id] = k + 1
            listener(Sampled(id, k, "length" if k + 1 >= sequence.max_tokens else None), rows)


def _inject_fault(mark: int, k: int) -> None:
    number = mark % 1_000_000
    if mark >= _FAULTS["block"] and k == 5:
        time.sleep(number)
    elif _FAULTS["poison"] <= mark < _FAULTS["block"] and k == number:
        os.kill(os.getpid(), signal.SIGKILL)


async def serve(settings: Settings, step_s: float) -> None:
    """Run the worker until it is stopped."""
    engine = PacedEngine(step_s)
    codec = TextCodec(PacedTokenizer(), 1_000_000)
    await codec.prepare()  # as a worker does at its start: else the first job stalls the event loop
    stepping = asyncio.create_task(engine.run())
    health = Health(settings.watchdog_s)
    with served_metrics(settings.model_name, settings.metrics_port, health) as metrics:
        context = WorkerContext(settings, engine, codec, None, "paced", 1_000_000, 1_000_000, {}, frozenset(), metrics)
        async with redis_from_settings(settings) as redis:
            worker = QueueWorker(
                JobFunctions([func(chat, name="chat")], {"context": context}),
                server=RedisServer(redis, settings),
                settings=settings,
                metrics=metrics,
                model=ServedModel(engine.set_paused, step_times=lambda: [step_s] * CLASSES),
            )
            health.set_checks({"event loop": worker.heartbeat}, worker.readiness.parts())
            await worker.main()
    stepping.cancel()
    if worker.restarts:
        execute_again()


if __name__ == "__main__":
    settings = read_settings()
    set_up_logging("sluice", settings.log_level)
    asyncio.run(serve(settings, float(os.environ.get("PACED_STEP_MS", "20")) / 1000))
