"""Drafts: tokens that a row is expected to draw next, offered for verification."""

from dataclasses import dataclass

MAX_DRAFT = 7  # tokens of a draft: with the row's next token, MLX's vector attention on Metal takes up to 8 queries


@dataclass(frozen=True)
class Offer:
    """A draft that continues a row after its last known token. A wrong draft costs time, and never changes a token."""

    kind: str
    tokens: tuple[int, ...]
    chances: tuple[float, ...]  # of each token: the probability that it is drawn if all tokens before it were
