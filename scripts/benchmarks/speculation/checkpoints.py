"""Models with random weights, of a size of which a step takes tens of milliseconds on a CPU: beside that, the host's
work has the share that it has for real models. The bundled model's steps take a few milliseconds."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from models.random_checkpoints import hybrid_checkpoint, random_checkpoint
from tests.support.stack import TINY_CHAT

_SPACE = "Ġ"  # as byte-level tokenizers write it
RANDOM: dict[str, Callable[..., Path]] = {
    "plain": partial(random_checkpoint, hidden=768, layers=8),
    "hybrid": partial(hybrid_checkpoint, hidden=768, layers=8),
}


@contextmanager
def random_model(kind: str) -> Iterator[Path]:
    """Write a checkpoint of a kind of `RANDOM`, and yield its folder, which exists while the context is open. Its
    likeliest tokens are whole words, so that its answers can be edited word by word, and never an end."""
    with TemporaryDirectory() as folder:
        yield RANDOM[kind](Path(folder) / f"random-{kind}", never_sampled=_no_words())


def _no_words() -> list[int]:
    """Return the tokens that are not a space and a word."""
    vocab: dict[str, int] = json.loads((TINY_CHAT / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    words = {id for token, id in vocab.items() if token[:1] == _SPACE and token[1:].isalpha() and token[1:].isascii()}
    return [id for id in range(max(vocab.values()) + 1) if id not in words]
