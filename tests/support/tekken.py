"""The vocabulary of a tekken.json, as llguidance takes it."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path


class Tokens:
    """A tokenizer as llguidance takes it, which finds the longest token at each place."""

    eos_token_id, bos_token_id = 2, 1
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self._ids = {token: id for id, token in enumerate(tokens)}
        self._longest = max(map(len, tokens))

    def __call__(self, text: bytes | str) -> list[int]:
        data, found = text.encode() if isinstance(text, str) else text, list[int]()
        while data:
            size = next(n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids)
            found.append(self._ids[data[:size]])
            data = data[size:]
        return found


def read_tekken(file: Path) -> list[bytes]:
    """Return the bytes of each token of a tekken.json, as mistral-common ships them; special tokens come first."""
    content = json.loads(file.read_text("utf-8"))
    config = content["config"]
    special = config["default_num_special_tokens"]
    ordinary = content["vocab"][: config["default_vocab_size"] - special]
    return [b"<%d>" % i for i in range(special)] + [base64.b64decode(entry["token_bytes"]) for entry in ordinary]
