"""Stand-ins: a tokenizer of bytes, an engine without a model, a chat that does what its request says, a bad line."""

import asyncio
import codecs
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

from jinja2 import Environment, TemplateError

from worker.chat.context import WorkerContext
from worker.monitoring.metrics import Metrics
from worker.outcomes import Outcome, OutcomeListener, Prefilled, Sampled, StepReport
from worker.queue.job.job import Job, JobResult
from worker.request import GenerationRequest
from worker.settings import Settings
from worker.text.codec import TextCodec
from worker.text.tokenizer import TemplateMessages

PLAIN_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


class Clock:
    """A clock that a test sets: it stands in place of the module `time` in the module under test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


class ByteDetokenizer:
    """An id beyond the vocabulary raises."""

    def __init__(self, vocab: list[bytes]) -> None:
        self._vocab = vocab
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._vocab[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class NoControlTokens:
    """A tokenizer's that has none."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.encode, self.mark, self.unmark = encode, str, str

    def found_in(self, text: str) -> bool:
        return False


class ByteTokenizer:
    """A token is a byte, or one of the given pieces: a code point may take several, and one may cut two."""

    byte_level, encode_literally = False, None
    added_tokens: ClassVar[dict[str, int]] = {}
    eos_token_ids = frozenset[int]()
    think = tool = None

    def __init__(self, *pieces: bytes, template: str = PLAIN_TEMPLATE) -> None:
        self.vocab = [*(bytes([value]) for value in range(256)), *pieces]
        self.tokens = [f"<0x{token.hex()}>" for token in self.vocab]
        self.template, self.threads = template, set[threading.Thread]()
        self.control_tokens = NoControlTokens(self.encode)

    def streaming(self) -> ByteDetokenizer:
        return ByteDetokenizer(self.vocab)

    def encode(self, text: str) -> list[int]:
        """The longest piece first."""
        rest, ids = text.encode(), []
        by_length = sorted(range(len(self.vocab)), key=lambda token: -len(self.vocab[token]))
        while rest:
            ids.append(next(token for token in by_length if rest.startswith(self.vocab[token])))
            rest = rest[len(self.vocab[ids[-1]]) :]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.vocab[token] for token in ids).decode("utf-8", "replace")

    def render(
        self, conversation: TemplateMessages, *, tools: list[dict[str, Any]], continues: bool,
        variables: dict[str, Any], images: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        self.threads.add(threading.current_thread())
        template = Environment().from_string(self.template)
        text = template.render(messages=conversation, tools=tools, raise_exception=_raise, **variables)
        for mark, image in (images or {}).items():
            text = text.replace(mark, image)
        return text


def _raise(words: str) -> None:
    raise TemplateError(words)


class FakeEngine:
    """Says `answer(sequence)`, a token a step and row. Reports reach the loop as the engine thread's do."""

    def __init__(self, answer: Callable[[GenerationRequest], Iterable[int]], *, step_s: float = 0.001) -> None:
        self._answer, self._step_s = answer, step_s
        self._rows: dict[str, tuple[GenerationRequest, OutcomeListener, Iterator[tuple[int, int]]]] = {}
        self.sequences: list[GenerationRequest] = []  # all that ever came

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    @property
    def running(self) -> set[str]:
        return set(self._rows)

    def submit(self, sequence: GenerationRequest, listener: OutcomeListener) -> None:
        assert sequence.id not in {earlier.id for earlier in self.sequences}, "they would hear each other"
        self.sequences.append(sequence)
        numbered = list(enumerate(self._answer(sequence)))
        self._rows[sequence.id] = (sequence, listener, iter(numbered[len(sequence.resume_tokens) :]))
        prompt = len(sequence.prompt)
        self._deliver(StepReport((Prefilled(sequence.id, prompt, prompt),), 0))

    def remove(self, sequence_id: str) -> None:
        self._rows.pop(sequence_id, None)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            outcomes = [_next(sequence, answer) for sequence, _, answer in self._rows.values()]
            self._deliver(StepReport(tuple(outcomes), len(outcomes)))

    def _deliver(self, report: StepReport) -> None:
        asyncio.get_running_loop().call_soon(self._tell, report)

    def _tell(self, report: StepReport) -> None:
        for outcome in report.outcomes:
            if row := self._rows.get(outcome.id):
                row[1](outcome, report.rows)


def _next(sequence: GenerationRequest, answer: Iterator[tuple[int, int]]) -> Outcome:
    k, token = next(answer, (0, None))
    if token is None:
        return Sampled(sequence.id, None, "stop")
    return Sampled(sequence.id, token, "length" if k + 1 == sequence.max_tokens else None)


def worker_context(settings: Settings, engine: FakeEngine, tokenizer: ByteTokenizer, **changed: Any) -> WorkerContext:
    vocab = len(tokenizer.vocab)
    known = {
        "images": None,
        "fingerprint": "fp_fake",
        "context_tokens": 2048,
        "vocab_size": vocab,
        "generation": {},
        "end_tokens": tokenizer.eos_token_ids,
        "metrics": Metrics("default"),
    }
    return WorkerContext(settings, engine, TextCodec(tokenizer, vocab), **{**known, **changed})


TIMINGS = {"queue_s": 0.0, "prefill_s": 0.0, "ttft_s": 0.0, "decode_s": 0.0, "tokens_per_s": 0.0}


class FakeChat:
    """Stands in for `worker.jobs.chat`: the request itself says what to do.

    `think`: words of reasoning, and `say`: words, a delta each; `pace_s` between the latter; `calls`: calls of tools, a
    delta each; `then`: an exception to raise, or "hang".
    """

    def __init__(self) -> None:
        self.running: list[Job] = []
        self.began: list[str] = []  # ids, an attempt each
        self.most = 0  # jobs at once

    async def chat(self, ctx: dict[Any, Any], request: dict[str, Any]) -> JobResult:
        job: Job = ctx["job"]
        self.running.append(job)
        self.began.append(job.claim.job_id)
        self.most = max(self.most, len(self.running))
        try:
            return await self._talk(job, request)
        finally:
            self.running.remove(job)

    async def _talk(self, job: Job, request: dict[str, Any]) -> JobResult:
        job.log.emit(
            "restarted" if job.claim.events else "started", model="default", fingerprint="fp_fake", worker="", seed=7
        )
        for word in request.get("think", []):
            job.log.emit("delta", token_ids=[0], reasoning=word)
        words = request.get("say", [])
        for k, word in enumerate(words):
            if k:
                await asyncio.sleep(request.get("pace_s", 0))
            job.usage.completion_tokens += 1
            job.log.emit("delta", token_ids=[k], content=word)
        match request.get("then"):
            case "hang":
                await asyncio.Event().wait()
            case str(words):
                raise ValueError(words)
        if calls := request.get("calls"):
            for index, call in enumerate(calls):
                job.log.emit("delta", token_ids=[index], tool_calls=[{"index": index, **call}])
            message = {"role": "assistant", "content": None, "tool_calls": calls}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
            head = {"id": job.claim.job_id, "object": "chat.completion", "created": 0, "model": "default"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            return JobResult("tool_calls", TIMINGS, {**head, "choices": [choice], "usage": usage})
        return JobResult("stop", TIMINGS, {"object": "chat.completion", "said": "".join(words)})
