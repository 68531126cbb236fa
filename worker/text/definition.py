"""A tokenizer's definition, as a guide may read it."""

import json
from typing import Any

NAME_BEGINS = "\ue000"  # a marker's name; for private use, so hardly a text has it
_BLANK = " \t\r\n▁"
_NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}


def unmarked(definition: str) -> str:
    """With names for the added tokens that no text has, and without Unicode's normal forms.

    llguidance (1.9) encodes what its grammar leaves no choice about. It must neither read a marker there where a
    schema's own words look like one, nor put characters together that the schema has apart. Grammars name markers by
    id. Runs of spaces keep their names: there text is all they are.
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
    """What it does to spaces stays: that is how the vocabulary writes them."""
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
    """Each token is there by one name alone, or llguidance refuses the vocabulary."""
    vocab, unknown = model["vocab"], model.get("unk_token")
    if isinstance(vocab, dict):
        vocab = {names.get(token, token): id for token, id in vocab.items()}
    else:  # a unigram's, with their scores
        vocab = [[names.get(token, token), score] for token, score in vocab]
    renamed = {**model, "vocab": vocab}
    if unknown in names:
        renamed["unk_token"] = names[unknown]
    if "merges" in model:
        renamed["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_of_merge(merge))]
    return renamed


def _of_merge(merge: str | list[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right
