"""What is said and counted while a row runs: deltas and progress on the way, usage, timings and the result."""

import logging
import time

from schemas import ChatRequest
from worker.queue.job import Answer, Job
from worker.resume import Delivered
from worker.served import Served

logger = logging.getLogger("sluice.jobs")

_PROGRESS_EVERY_S = 0.25
_GATHER_S = {"interactive": 0.0, "batch": 1.0}  # offline deltas are gathered, so that a file does not fill Redis


class Record:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._began = self._said_progress = self._said_delta = time.monotonic()
        self._began_at = job.log.clock.now()
        self._prefilled_at = self._first_at = self._last_at = self._began
        self._gather_s = _GATHER_S[job.claim.lane]
        self._ids: list[int] = []
        self._text = ""
        self._whole: list[str] = []
        self._rows = self._steps = 0

    def resume(self, earlier: Delivered) -> None:
        """Count what was delivered before; timings are of this attempt alone."""
        self._whole.append(earlier.content)
        self._job.usage.completion_tokens = len(earlier.tokens)

    def prefilled(self, done: int, total: int) -> None:
        self._prefilled_at = now = time.monotonic()
        if done < total and now - self._said_progress >= _PROGRESS_EVERY_S:
            self._said_progress = now
            self._job.log.say("progress", phase="prefill", done=done, total=total)

    def sampled(self, token: int | None, text: str, rows: int, *, last: bool) -> None:
        self._last_at = now = time.monotonic()
        if self._steps == 0:
            self._first_at = now
            logger.info("%s first token after %.3f s", self._job.claim.job_id, now - self._began)
        self._rows, self._steps = self._rows + rows, self._steps + 1
        self._text += text
        self._job.made_progress()
        if token is not None:
            self._ids.append(token)
            self._job.usage.completion_tokens += 1
        if last or now - self._said_delta >= self._gather_s:
            self.flush()

    def flush(self) -> None:
        """Say what was gathered."""
        if self._ids or self._text:
            content = {"content": self._text} if self._text else {}
            self._job.log.say("delta", token_ids=self._ids, **content)
        self._whole.append(self._text)
        self._ids, self._text, self._said_delta = [], "", time.monotonic()

    def answer(self, request: ChatRequest, served: Served, seed: int, finish_reason: str) -> Answer:
        timings = self._timings()
        spent = f"{self._job.usage.completion_tokens} tokens, {timings['tokens_per_s']:.1f}/s"
        logger.info("%s finished: %s, %s", self._job.claim.job_id, finish_reason, spent)
        return Answer(finish_reason, timings, self._completion(request, served, seed, finish_reason, timings))

    def _timings(self) -> dict[str, float]:
        decode_s = self._last_at - self._first_at
        timings = {
            "queue_s": max(0.0, self._began_at - self._job.claim.queued_at),
            "prefill_s": self._prefilled_at - self._began,
            "ttft_s": self._first_at - self._began,
            "decode_s": decode_s,
            "tokens_per_s": (self._steps - 1) / decode_s if decode_s > 0 else 0.0,
        }
        return {name: round(value, 6) for name, value in timings.items()}

    def _completion(
        self, request: ChatRequest, served: Served, seed: int, finish_reason: str, timings: dict[str, float]
    ) -> dict[str, object]:
        """OpenAI's `chat.completion`, with what is ours under `sluice`."""
        claim, usage = self._job.claim, self._job.usage
        message = {"role": "assistant", "content": "".join(self._whole), "refusal": None}
        echoed = request.model_dump(include={"tenant", "user", "metadata", "store"}, exclude_none=True)
        return {
            "id": claim.job_id,
            "object": "chat.completion",
            "created": int(self._began_at),
            "model": served.settings.model_name,
            "system_fingerprint": served.fingerprint,
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}],
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
            "sluice": {
                "lane": claim.lane,
                "worker": served.settings.worker_name,
                "attempt": claim.attempt,
                "seed": seed,
                "fingerprint": served.fingerprint,
                "timings": timings,
                "rows_mean": round(self._rows / max(self._steps, 1), 2),
                **echoed,
            },
        }
