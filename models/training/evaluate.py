"""Evaluates a model: greedy answers to new chats, each correct only as a whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper

from models.training import data
from models.training.data import Chat, Message, Skill
from models.training.tokenizer import TURN_END

MAX_ANSWER = 160  # tokens; counting to 40 takes 110

SKILLS: dict[str, Skill] = {
    "recall a name over turns": data.recall_name,
    "find a code in ~100 tokens": partial(data.find_code, fillers=3),
    "find a code in ~400 tokens": partial(data.find_code, fillers=34),
    "find a code in ~900 tokens": partial(data.find_code, fillers=87),
    "find a code in ~1,500 tokens": partial(data.find_code, fillers=150),
    "find a code in ~3,000 tokens": partial(data.find_code, fillers=308),
    "repeat emoji, CJK, accents, Cyrillic": data.repeat_signs,
    "obey the system prompt": data.obey_system,
    "capitals": data.capital,
    "colours": data.colour,
    "count to n (2 to 40)": data.count,
    "JSON": data.answer_in_json,
    "think": data.think,
    "call a tool": data.call_tool,
}


@dataclass(frozen=True, slots=True)
class Score:
    """Number of correct answers for one skill."""

    skill: str
    right: int
    cases: int


class Answerer:
    """Answers chats with a model."""

    def __init__(self, folder: Path) -> None:
        self.network, self.tokenizer = _load(folder)

    def answer(self, messages: list[Message]) -> str:
        """Return the greedy answer to these messages."""
        chat = [{"role": role, "content": text} for role, text in messages]
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        return str(self.tokenizer.decode(list(self._until_end(prompt))))

    def _until_end(self, prompt: list[int]) -> Iterator[int]:
        for token, _ in generate_step(mx.array(prompt), self.network, max_tokens=MAX_ANSWER):
            if token == TURN_END:
                return
            yield token

    def is_right(self, chat: Chat) -> bool:
        """Return True if the model gives the last message of the chat as its answer."""
        *question, right = chat
        return self.answer(question) == right.text


def _load(folder: Path) -> tuple[nn.Module, TokenizerWrapper]:
    network, tokenizer = mlx_lm.load(str(folder))[:2]
    if mx.default_device() == mx.cpu:
        # The CPU emulates half precision, which is slow.
        network.set_dtype(mx.float32)
    return network, tokenizer


def evaluate(folder: Path, cases: int, seed: int, show: Callable[[Score], None]) -> None:
    """Ask `cases` questions for each skill, and pass each score to `show`."""
    answerer = Answerer(folder)
    for skill, draw in SKILLS.items():
        dice = Random(f"{seed}/{skill}")
        show(Score(skill, sum(answerer.is_right(draw(dice)) for _ in range(cases)), cases))
