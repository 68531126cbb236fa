"""Rewrites a tokenizer's definition for llguidance."""

import json
from typing import Any

NAME_BEGINS = "\ue000"  # begins a marker's name; a private-use character, which texts hardly ever contain
_BLANK = " \t\r\n▁"
_NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}


def without_added_tokens(definition: str) -> str:
    """Return the definition with added tokens renamed to unlikely strings, and without Unicode normalizers.

    llguidance (1.9) tokenizes text that its grammar forces. If a schema's own text looks like a marker, it must not
    become that token, and a normalizer must not compose characters that the schema writes separately. Grammars name
    markers by id. Added tokens of nothing but space keep their names, since they are plain text.
    """
    read = json.loads(definition)
    match read:
        case {"added_tokens": [*added], "model": {"vocab": dict() | list()} as model}:
            names = {entry["content"]: _name(entry["id"]) for entry in added if entry["content"].strip(_BLANK)}
            read["added_tokens"] = [_renamed(entry, names) for entry in added]
            read["model"] = _rename_within(model, names)
            read["normalizer"] = _literal(read.get("normalizer"))
            return json.dumps(read)
    return definition


def _literal(normalizer: Any) -> Any:
    """Return the normalizer without Unicode's normal forms. Its replacement of spaces stays, as in the vocabulary."""
    match normalizer:
        case {"type": kind} if kind in _NORMAL_FORMS:
            return None
        case {"type": "Sequence", "normalizers": [*inner]}:
            return {"type": "Sequence", "normalizers": [each for each in map(_literal, inner) if each]}
    return normalizer


def _name(token: int) -> str:
    return f"{NAME_BEGINS}{token}\ue001"


def _renamed(entry: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    name = names.get(entry["content"])
    return {**entry, "content": name, "special": True} if name else entry


def _rename_within(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Rename the tokens in the model too: llguidance refuses a vocabulary that has two names for a token."""
    vocab, unknown = model["vocab"], model.get("unk_token")
    if isinstance(vocab, dict):
        vocab = {names.get(token, token): id for token, id in vocab.items()}
    else:  # a unigram model's, with scores
        vocab = [[names.get(token, token), score] for token, score in vocab]
    renamed = {**model, "vocab": vocab}
    if unknown in names:
        renamed["unk_token"] = names[unknown]
    if "merges" in model:
        renamed["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_parts_of_merge(merge))]
    return renamed


def _parts_of_merge(merge: str | list[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right
