"""Compare the tokens of a model with those of its draft model: each must read what the other writes."""

from collections.abc import Sequence

from worker.engine.model.load import Model
from worker.engine.tokenizer import MLXTokenizer


def tokens_read(model: Model) -> list[str]:
    """Return the model's tokens by id, without the image placeholder, which a draft model does not read."""
    tokens = MLXTokenizer(model.tokenizer).tokens
    if model.vision:
        tokens[model.vision.family.placeholder] = ""
    return tokens


def why_not_same_tokens(target: Sequence[str], draft: Sequence[str], vocab: int) -> str | None:
    """Return why a draft model does not read the model's tokens, and what to do; None if it does. `target` and `draft`:
    tokens of the model and of its draft by id, "" for ids without a token. `vocab`: number of the draft's logits,
    unnamed tokens included."""
    why_not = _difference(target, draft, vocab)
    return why_not and f"{why_not}. Choose a draft of the model's own family, which shares its tokens."


def _difference(target: Sequence[str], draft: Sequence[str], vocab: int) -> str | None:
    for token, (name, draft_name) in enumerate(zip(target, draft, strict=False)):
        if name and draft_name and name != draft_name:
            return f"Token {token} is {name!r} in the model and {draft_name!r} in its draft"
    unknown = (token for token, name in enumerate(target) if name and token >= vocab)
    if (first := next(unknown, None)) is not None:
        return f"The draft has {vocab:,} tokens, and the model's token {first} is {target[first]!r}"
    return None
