"""Chats as rows of tokens, each token with the weight of its loss."""

from dataclasses import dataclass, field
from random import Random

import mlx.core as mx
from tokenizers import Tokenizer

from models.training.curriculum import Lesson
from models.training.data import Chat, draw_chat
from models.training.tokenizer import PADDING, TURN_END, TURN_START

CONTEXT_WEIGHT = 0.03  # loss weight of tokens that are not the assistant's; the assistant's have 1 more


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of tokens with loss weights."""

    tokens: mx.array  # [rows, length + 1]
    weights: mx.array  # [rows, length]: for each token but the first


@dataclass(slots=True)
class Tokens:
    """Token ids, each with its loss weight."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: list[int], weight: float) -> None:
        """Append tokens with this weight."""
        self.ids += ids
        self.weights += [weight] * len(ids)

    def fit_to(self, length: int) -> "Tokens":
        """Return the tokens, cut or padded to this length."""
        missing = max(0, length - len(self.ids))
        ids = self.ids + [PADDING] * missing
        return Tokens(ids[:length], (self.weights + [0.0] * missing)[:length])


def encode(tokenizer: Tokenizer, chat: Chat) -> Tokens:
    """Encode a chat. Each message is encoded separately, so that its weights apply to whole tokens."""
    tokens = Tokens()
    for role, text in chat:
        weight = CONTEXT_WEIGHT + 1 if role == "assistant" else CONTEXT_WEIGHT
        tokens.add([TURN_START, *tokenizer.encode(f"{role}\n").ids], CONTEXT_WEIGHT)
        tokens.add([*tokenizer.encode(text).ids, TURN_END], weight)
        tokens.add(tokenizer.encode("\n").ids, CONTEXT_WEIGHT)
    return tokens


def pack_row(tokenizer: Tokenizer, dice: Random, lesson: Lesson) -> Tokens:
    """Fill a row with whole chats and padding. Only the first chat may be cut."""
    row, length = Tokens(), lesson.length + 1
    while len(row.ids) < length:
        chat = encode(tokenizer, draw_chat(dice, fillers=lesson.fillers, copying=lesson.copying))
        if row.ids and len(row.ids) + len(chat.ids) > length:
            break
        row = Tokens(row.ids + chat.ids, row.weights + chat.weights)
    return row.fit_to(length)


def draw_batch(tokenizer: Tokenizer, dice: Random, lesson: Lesson) -> Batch:
    """Draw the batch of one step."""
    rows = [pack_row(tokenizer, dice, lesson) for _ in range(lesson.rows)]
    tokens, weights = mx.array([row.ids for row in rows]), mx.array([row.weights for row in rows])
    return Batch(tokens, weights[:, 1:])
