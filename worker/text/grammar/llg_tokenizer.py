"""Rewrites a tokenizer's definition for llguidance, and splits long texts that grammars force."""

import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer

NAME_BEGINS = "\ue000"  # begins a marker's name; a private-use character, which texts hardly ever contain
_BLANK = " \t\r\n▁"
_NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
_LONG = 512  # bytes; llguidance tokenizes a text of this length in a tenth of a millisecond
_READ = 256  # bytes of a long text that are tokenized at once
_UNSURE = 64  # bytes at the end of these, whose tokens could be others if more were read
_MARKER = b"\xff"  # begins a control token in llguidance's texts


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


def added_tokens(definition: str) -> dict[str, int]:
    """Return the tokens that `without_added_tokens` renames, by their text: grammars name them by id."""
    match json.loads(definition):
        case {"added_tokens": [*added]}:
            return {entry["content"]: entry["id"] for entry in added if entry["content"].strip(_BLANK)}
    return {}


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


class ForcedText:
    """Reads the long texts that matchers of one vocabulary leave no choice about.

    llguidance (1.9) tokenizes all of such a text again for each mask, so a literal of 10,000 letters takes some
    milliseconds of each token, and all rows of the batch wait. Here only its beginning is tokenized. A matcher accepts
    any tokens that spell the text."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._mask_bytes = -(-vocabulary.vocab_size // 32) * 4

    def tokens(self, matcher: LLMatcher, last: int | None) -> list[int]:
        """Return the first tokens of the text that must come next; none unless it is long. `last`: the token before it;
        None: there is none. The text is split as it would be together with this token, if that stays as it is."""
        text = matcher.compute_ff_bytes()
        if len(text) <= _LONG or _MARKER in text[:_READ]:
            return []
        return self._whole(self._split(text[:_READ], last), text)

    def mask(self, token: int) -> bytes:
        """Return the mask that allows this token alone: see `GrammarState.bitmask`."""
        return (1 << token).to_bytes(self._mask_bytes, "little")

    def _split(self, text: bytes, last: int | None) -> list[int]:
        if last is not None:
            together = self._vocabulary.tokenize_bytes(self._vocabulary.decode_bytes([last]) + text)
            if together[:1] == [last]:
                return together[1:]
        return self._vocabulary.tokenize_bytes(text)

    def _whole(self, tokens: list[int], text: bytes) -> list[int]:
        """Return the first tokens, as far as they spell the text and would not change if more of it were read."""
        whole, end = list[int](), 0
        for token in tokens:
            spelled = self._vocabulary.decode_bytes([token])
            if not spelled or end + len(spelled) > _READ - _UNSURE or text[end : end + len(spelled)] != spelled:
                break
            end += len(spelled)
            whole.append(token)
        return whole
