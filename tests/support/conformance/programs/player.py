"""A worker that answers by script, real in all else: `python -m tests.support.conformance.programs.player`.

It loads a model for its tokenizer, template and processor of images, but computes nothing. Prompts are compared with
the ones before, as the prefix cache would: PLAYER_LOG is a file that gets a line for each of them.
"""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.conformance.programs.script import Answer, answer_to
from worker import __main__ as worker
from worker.engine import thread
from worker.engine.model.load import Model
from worker.engine.step.cost import StepTimes
from worker.outcomes import OutcomeListener, Prefilled, Sampled, StopReason
from worker.request import GenerationRequest

_REMEMBERED = 256  # conversations' prompts whose tokens are compared with the next one's
_TOKENS_AT_ONCE = 20  # without a pause, so that a long answer leaves the event loop to others


class Player:
    """Plays the answers to prompts on the event loop."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: encodes and decodes texts, as transformers' do."""
        self._tokenizer = tokenizer
        self._playing = dict[str, asyncio.Task[None]]()
        self._seen = list[np.ndarray]()

    def submit(self, request: GenerationRequest, listener: OutcomeListener) -> None:
        """Play the answer to the prompt's script."""
        self._playing[request.id] = asyncio.create_task(self._play(request, listener))

    def remove(self, request_id: str) -> None:
        """Stop playing an answer that has not ended."""
        if task := self._playing.pop(request_id, None):
            task.cancel()
            _write({"stopped": request_id})

    async def _play(self, request: GenerationRequest, listener: OutcomeListener) -> None:
        answer = answer_to(self._tokenizer.decode(list(request.prompt)))
        found = self._found(request.cache_key(request.prompt))
        total = len(request.prompt)
        await asyncio.sleep(answer.step.silent_s if answer.step else 0)
        listener(Prefilled(request.id, total, total, min(found, total - 1)), 1)
        tokens: list[int | None] = [*self._tokenizer.encode(answer.text, add_special_tokens=False), None]
        self._note(request, answer, found, total)
        for at in range(len(request.resume_tokens), len(tokens)):
            token_s = answer.step.token_s if answer.step else 0.0
            if token_s or at % _TOKENS_AT_ONCE == 0:
                await asyncio.sleep(token_s)
            last = tokens[at] is None or at + 1 >= request.max_tokens
            if last:
                del self._playing[request.id]
                self._remember(request.cache_key((*request.prompt, *filter(None, tokens[: at + 1]))))
            self._emit(request, listener, at, tokens[at])
            if last:
                return

    def _emit(self, request: GenerationRequest, listener: OutcomeListener, at: int, token: int | None) -> None:
        ending: StopReason | None = "length" if at + 1 >= request.max_tokens else None
        if token is None:
            ending = "stop"
        listener(Sampled(request.id, token, ending, at=time.monotonic()), 1)

    def _found(self, tokens: tuple[int, ...]) -> int:
        """Return the length of the longest common prefix with an earlier prompt and its answer."""
        given = _digest(tokens)
        return max((_common(given, seen) for seen in self._seen), default=0)

    def _remember(self, tokens: tuple[int, ...]) -> None:
        self._seen = [*self._seen[1 - _REMEMBERED :], _digest(tokens)]

    def _note(self, request: GenerationRequest, answer: Answer, found: int, total: int) -> None:
        noted = {
            "job": request.id,
            "turn": answer.turn,
            "step": answer.number if answer.step else None,
            "prompt_tokens": total,
            "found_tokens": found,
            "images": len(request.images),
            "max_tokens": request.max_tokens,
        }
        _write(noted)


class PlayingThread(thread.EngineThread[Model]):
    """Loads the model as the engine's thread does, and lets a player answer."""

    async def start(self) -> Model:
        """Load the model."""
        model = await super().start()
        self._player = Player(model.tokenizer)
        return model

    def submit(self, request: thread.Request, listener: OutcomeListener) -> None:
        """Play the answer to the prompt's script."""
        assert isinstance(request, GenerationRequest)
        self._player.submit(request, listener)

    def remove(self, request_id: str) -> None:
        """Stop playing."""
        self._player.remove(request_id)

    def step_times(self) -> tuple[float, ...]:
        """Return the times of steps that take no time."""
        return StepTimes().seconds(time.monotonic())


def _write(noted: dict[str, Any]) -> None:
    if file := os.environ.get("PLAYER_LOG"):
        with Path(file).open("a", encoding="utf-8") as log:
            log.write(json.dumps(noted) + "\n")


def _digest(tokens: tuple[int, ...]) -> np.ndarray:
    """Return the tokens as numbers of one word; those of images, which are long, by their lowest digits."""
    return np.array([token % (1 << 61) for token in tokens], dtype=np.int64)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


if __name__ == "__main__":
    thread.EngineThread = PlayingThread  # type: ignore[misc, assignment]  # what the worker creates when it loads the model
    worker.main()
