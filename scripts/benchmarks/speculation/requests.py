"""Makes the engine's requests of a task, as a worker makes them of a chat."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from schemas import ChatRequest
from scripts.benchmarks.speculation.tasks import TASKS, Task, chats, edited
from worker.engine.model.load import Model
from worker.engine.tokenizer import MLXTokenizer
from worker.request import GenerationRequest, Sampling
from worker.text.codec import TextCodec

MAX_TOKENS = 96  # of an answer
_NEVER = -100.0  # bias of a token that must not be drawn

Answer = Callable[[Sequence[GenerationRequest]], Sequence[Sequence[int]]]


class Requests:
    """The requests of one model. A grammar belongs to the engine that it was given to, so each run gets its own."""

    def __init__(self, model: Model, answer: Answer, *, random_weights: bool = False) -> None:
        """`answer`: compute the answers to requests without drafts, from which the predictions are made.
        `random_weights`: the model has them."""
        self._model, self._answer = model, answer
        self._random_weights = random_weights
        self._codec = TextCodec(MLXTokenizer(model.tokenizer), model.vocab)
        self._loop = asyncio.Runner()
        self._predictions: dict[tuple[str, int], list[tuple[int, ...]]] = {}  # by task and run

    def close(self) -> None:
        """End the threads that the requests were made on."""
        self._loop.close()

    def make(self, name: str, number: int, count: int, *, predicted: bool) -> list[GenerationRequest]:
        """Return the requests of run `number` of a task. `predicted`: with predictions, if the task has them."""
        task = TASKS[name].by_random_weights if self._random_weights else TASKS[name]
        expected = self._expected(name, number, count) if predicted and task.predicted else [()] * count
        return [
            self._request(task, number, index, messages, prediction)
            for index, (messages, prediction) in enumerate(zip(chats(name, number, count), expected, strict=True))
        ]

    def _expected(self, name: str, number: int, count: int) -> list[tuple[int, ...]]:
        known = self._predictions.get((name, number), [])
        if len(known) < count:
            answers = self._answer(self.make(name, number, count, predicted=False))
            known = self._predictions[name, number] = [self._prediction(answer) for answer in answers]
        return known[:count]

    def _prediction(self, answer: Sequence[int]) -> tuple[int, ...]:
        text = edited(str(self._model.tokenizer.decode(list(answer))))
        return self._loop.run(self._codec.prediction(text))

    def _request(
        self, task: Task, number: int, index: int, messages: list[dict[str, Any]], prediction: tuple[int, ...]
    ) -> GenerationRequest:
        asked = ChatRequest.model_validate({"messages": messages, **task.fields})
        prompt = self._loop.run(self._codec.prompt(asked))
        grammar = self._loop.run(self._codec.grammar(asked, prompt, drafts=True))
        ends = self._model.tokenizer.eos_token_ids if task.endless else ()
        bias = tuple((token, _NEVER) for token in sorted(ends))
        sampling = Sampling(temperature=task.temperature, logit_bias=bias, seed=index)
        id = f"{number}.{index}"
        return GenerationRequest(id, prompt.tokens, MAX_TOKENS, sampling, grammar=grammar, prediction=prediction)
