"""The tasks: chats of the tiny model's world, each with drafts of one kind to find, or with none."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from models.training import data
from models.training.data import Chat

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
