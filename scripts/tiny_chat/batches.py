"""Chats as rows of tokens, each token with the weight of its loss."""

from dataclasses import dataclass, field
from random import Random

import mlx.core as mx
from tokenizers import Tokenizer

from scripts.tiny_chat.curriculum import Lesson
from scripts.tiny_chat.data import Chat, draw_chat
from scripts.tiny_chat.tokenizer import PADDING, TURN_END, TURN_START

ELSEWHERE = 0.03  # the loss weight of what the assistant did not say; of what it says, 1 more


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: mx.array  # [rows, length + 1]
    weights: mx.array  # [rows, length]: of each token but the first


@dataclass(slots=True)
class Tokens:
    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: list[int], weight: float) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)

    def cut_or_filled(self, length: int) -> "Tokens":
        missing = max(0, length - len(self.ids))
        ids = self.ids + [PADDING] * missing
        return Tokens(ids[:length], (self.weights + [0.0] * missing)[:length])


def encode(tokenizer: Tokenizer, chat: Chat) -> Tokens:
    """Message by message, so that the weights' borders are tokens' borders."""
    tokens = Tokens()
    for role, text in chat:
        said = ELSEWHERE + 1 if role == "assistant" else ELSEWHERE
        tokens.add([TURN_START, *tokenizer.encode(f"{role}\n").ids], ELSEWHERE)
        tokens.add([*tokenizer.encode(text).ids, TURN_END], said)
        tokens.add(tokenizer.encode("\n").ids, ELSEWHERE)
    return tokens


def pack_row(tokenizer: Tokenizer, dice: Random, lesson: Lesson) -> Tokens:
    """Whole chats while they fit, and the rest is padding; only a first chat may be cut."""
    row, length = Tokens(), lesson.length + 1
    while len(row.ids) < length:
        chat = encode(tokenizer, draw_chat(dice, fillers=lesson.fillers, copying=lesson.copying))
        if row.ids and len(row.ids) + len(chat.ids) > length:
            break
        row = Tokens(row.ids + chat.ids, row.weights + chat.weights)
    return row.cut_or_filled(length)


def draw_batch(tokenizer: Tokenizer, dice: Random, lesson: Lesson) -> Batch:
    rows = [pack_row(tokenizer, dice, lesson) for _ in range(lesson.rows)]
    tokens, weights = mx.array([row.ids for row in rows]), mx.array([row.weights for row in rows])
    return Batch(tokens, weights[:, 1:])
