"""The tasks: chats of the tiny model's world, each with drafts of one kind to find, or with none."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from models.training import data
from models.training.data import Chat
from schemas import ChatRequest
from worker.engine.model.load import Model
from worker.engine.tokenizer import MLXTokenizer
from worker.request import GenerationRequest, Sampling
from worker.text.codec import TextCodec

Message = dict[str, Any]  # as in a request
_EDITED_EVERY = 12  # words of a prediction, of which one is another than in the answer


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of request."""

    about: str
    draw: Callable[[Random], list[Message]]
    proposers: tuple[str, ...]  # those that may find drafts, or that a bar wants to find none
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the request, beside its messages
    temperature: float = 0.0
    endless: bool = False  # answers never end by themselves
    predicted: bool = False  # the client expects the answer, but for a few words
    any_model: bool = False  # a model with random weights can be measured with it

    @property
    def by_random_weights(self) -> "Task":
        """Return the task for a model with random weights, whose likeliest tokens soon repeat themselves: sampled, so
        that there is nothing to copy, and without an end; except answers that the client expects."""
        return self if self.predicted else replace(self, temperature=1.0, endless=True)


def _messages(chat: Chat) -> list[Message]:
    """Return the messages before the answer."""
    return [{"role": role, "content": text} for role, text in chat[:-1]]


def _recall(dice: Random) -> list[Message]:
    chat = data.find_code(dice, 3) if dice.random() < 0.5 else data.repeat_words(dice)
    return _messages(chat)


def _count(dice: Random) -> list[Message]:
    return _messages(data.exchange(f"Count to {dice.randint(30, 40)}.", ""))


def _tool_call_again(dice: Random) -> list[Message]:
    city = dice.choice(data.CITIES)
    asked = {"role": "user", "content": f"Call the weather tool for {city}."}
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    called = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    answered = {"role": "tool", "tool_call_id": "call_1", "content": f"{dice.randint(-9, 30)} degrees"}
    return [asked, called, answered, asked]


def _json(dice: Random) -> list[Message]:
    return _messages(data.answer_in_json(dice))


def _story(dice: Random) -> list[Message]:
    return [{"role": "user", "content": " ".join(data.filler(dice) for _ in range(3))}]


def _any_skill(dice: Random) -> list[Message]:
    return _messages(data.draw_chat(dice, fillers=6))


_THREE_CITIES = {"enum": ["Oslo", "Paris", "Lima"]}
# Keys and values after which the tiny model writes JSON as it has learned to, without runs of white space.
_LONG_KEYS = {
    "type": "object",
    "properties": {
        "country_in_the_question": _THREE_CITIES,
        "capital_in_the_answer": _THREE_CITIES,
        "answer_is_certain": {"type": "boolean"},
    },
    "required": ["country_in_the_question", "capital_in_the_answer", "answer_is_certain"],
    "additionalProperties": False,
}
_SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _LONG_KEYS}},
}
_WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

TASKS = {
    "recall": Task("answers that repeat a part of their prompt", _recall, ("copies", "mtp", "draft", "all")),
    "edit": Task(
        f"a prediction that equals the answer but for one word in {_EDITED_EVERY}",
        _count,
        ("prediction", "all"),
        predicted=True,
        any_model=True,
    ),
    "tools": Task(
        "a tool call that equals one earlier in the conversation",
        _tool_call_again,
        ("copies", "mtp", "draft", "all"),
        fields={"tools": [_WEATHER_TOOL]},
    ),
    "json": Task(
        "a JSON schema with long keys, whose values are choices",
        _json,
        ("grammar", "mtp", "draft", "all"),
        fields=_SCHEMA,
    ),
    "free": Task(
        "text sampled at temperature 1, of which nothing repeats",
        _story,
        ("idle", "copies", "mtp", "draft", "all"),
        temperature=1.0,
        endless=True,
        any_model=True,
    ),
    "count": Task(
        "counting to 30 or more: nothing to copy", _count, ("idle", "copies", "mtp", "draft", "all"), any_model=True
    ),
    "mixed": Task("any skill of the tiny model", _any_skill, ("copies", "mtp", "mtp-fixed", "draft", "all")),
}


def edited(text: str) -> str:
    """Return a text in which one word in `_EDITED_EVERY` is another one."""
    words = text.split(" ")
    for index in range(_EDITED_EVERY // 2, len(words), _EDITED_EVERY):
        words[index] = "changed"
    return " ".join(words)


def chats(name: str, number: int, count: int) -> Sequence[list[Message]]:
    """Return the chats of one run of a task: the first `count` of an endless list, always the same."""
    return [TASKS[name].draw(Random(f"{name}/{number}/{index}")) for index in range(count)]


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
