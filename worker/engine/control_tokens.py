"""Control tokens quoted in a client's text: `<|im_end|>` within a message is ten characters, not the end of a turn.

Before a chat template receives a client's text, each control token in it is put between two private-use characters. In
the rendered text, anything between these is encoded as text, and the rest as usual. The functions for that are
transformers'. They would drop these private-use characters from a client's own text, so those are escaped."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from worker.engine.upstream.transformers import (
    CONTROL_TOKEN_END,
    CONTROL_TOKEN_START,
    encode_marked_chat,
    mark_control_tokens,
)

# The marks as written by a template's `tojson(ensure_ascii=True)`, or by one that prints an object's Python repr.
_SPELLED = {
    r"\udb80\udc00": CONTROL_TOKEN_START, r"\udb80\udc01": CONTROL_TOKEN_END,
    r"\U000f0000": CONTROL_TOKEN_START, r"\U000f0001": CONTROL_TOKEN_END,
}  # fmt: skip
_ESCAPE = "\U0010ffff"  # a noncharacter, reserved for internal use
_ESCAPED = (_ESCAPE, CONTROL_TOKEN_START, CONTROL_TOKEN_END)  # written as an escape and its index here
_APART = f"{_ESCAPE}{len(_ESCAPED)}"  # decodes to nothing; breaks up text of a client that spells a mark
_ESCAPES = re.compile(f"{_ESCAPE}([0-{len(_ESCAPED)}])")
# A delimiter, recognized by its form: a template may build one from a role's name, so its source may not contain it.
_DELIMITER = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)

# Characters per call of a library function, which holds the interpreter's lock for some milliseconds.
_SLICE = 1 << 16

Encode = Callable[[str], list[int]]
Trie = dict[str, "Trie"]


class ControlTokens:
    """The control tokens of one model: finds, marks and encodes them in texts."""

    def __init__(self, tokenizer: Any, template: str, markers: Iterable[str], encode: Encode) -> None:
        """`tokenizer`: transformers' own. `template`: the chat template's source, empty if it is not text. `markers`:
        texts that count as control tokens even if the tokenizer does not treat them so. `encode`: encodes plain
        text."""
        self._tokenizer, self._encode = tokenizer, encode
        tokens = _control_tokens(tokenizer, template) | {marker for marker in markers if marker}
        self._marked_tokens = dict[str, str]()
        self._pattern, self._longest = _pattern(tokens), max(map(len, tokens), default=0)

    def found_in(self, text: str) -> bool:
        """Return True if the text contains a control token."""
        return any(self._found(self._normalized(text)))

    def mark(self, text: str) -> str:
        """Return the text with its control tokens marked, so that `encode` reads them as text."""
        text = self._normalized(_escaped(text))
        pieces = list[str]()
        end = 0
        for found in self._found(text):
            pieces += [text[end : found.start()], self._marked_token(found[0])]
            end = found.end()
        return "".join(pieces) + text[end:]

    def _marked_token(self, text: str) -> str:
        if text not in self._marked_tokens:  # few distinct ones, but a text may quote one a million times
            self._marked_tokens[text] = mark_control_tokens(text, self._pattern)
        return self._marked_tokens[text]

    def unmark(self, text: str) -> str:
        """Return the original text of a marked text, or of a piece of one."""
        text = text.replace(CONTROL_TOKEN_START, "").replace(CONTROL_TOKEN_END, "")
        return _ESCAPES.sub(lambda found: "".join(_ESCAPED[int(found[1]) :][:1]), text) if _ESCAPE in text else text

    def encode(self, text: str) -> list[int]:
        """Encode a rendered template with marked contents. Raises ValueError for a control token that this tokenizer
        cannot write as text."""
        for spelled, char in _SPELLED.items():
            text = text.replace(spelled, char)
        return [token for part in _slices(text) for token in encode_marked_chat(self._marked, part)]

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        start = 0
        while start < len(text):
            found = self._pattern.search(text, start, start + _SLICE + self._longest)
            if found and found.start() < start + _SLICE:
                yield found
                start = found.end()
            else:
                start += _SLICE

    @cached_property
    def _marked(self) -> "_Marked":
        return _Marked(self._tokenizer, lambda text: self._encode(self.unmark(text)))

    def _normalized(self, text: str) -> str:
        """Return the normalized text if it contains more control tokens than the text itself: a tokenizer may search
        the normalized text, in which full-width letters can spell one."""
        if self._normalizer is None:
            return text
        normalized = str(self._normalizer.normalize_str(text))
        more = sum(1 for _ in self._found(normalized)) > sum(1 for _ in self._found(text))
        return normalized if more else text

    @cached_property
    def _normalizer(self) -> Any:
        if not any(token.normalized for token in self._tokenizer.added_tokens_decoder.values()):
            return None
        return getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None)


class _Marked:
    """The tokenizer interface that `encode_marked_chat` uses, with a memo for repeated texts."""

    def __init__(self, tokenizer: Any, encode: Encode) -> None:
        self._tokenizer, self._encode = tokenizer, encode
        self._as_text = dict[str, list[int]]()
        self.added_tokens_encoder: dict[str, int] = tokenizer.added_tokens_encoder
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._encode(text)

    def _encode_without_added_tokens(self, text: str) -> list[int]:
        if text not in self._as_text:
            self._as_text[text] = self._spelled(text)
        return self._as_text[text]

    def _spelled(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer._encode_without_added_tokens(text)
        if self._added.isdisjoint(ids):
            return ids
        # A vocabulary may contain the control token's text as an ordinary piece. Encoded in two parts, it yields none.
        middle = len(text) - len(text.lstrip()) + 1
        return [
            token
            for part in (text[:middle], text[middle:])
            for token in self._tokenizer._encode_without_added_tokens(part)
        ]

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(id for text, id in self.added_tokens_encoder.items() if not text.isspace())


def _escaped(text: str) -> str:
    for number, char in enumerate(_ESCAPED):  # the escape itself comes first, so that no escape is escaped twice
        text = text.replace(char, f"{_ESCAPE}{number}")
    for spelled in _SPELLED:
        text = text.replace(spelled, f"{spelled[:-1]}{_APART}{spelled[-1]}")
    return text


def _slices(text: str) -> Iterator[str]:
    """Yield pieces of the text. Each but the first begins with a marked token, where `encode_marked_chat` would split
    anyway."""
    start = 0
    while start < len(text):
        end = text.find(CONTROL_TOKEN_START, start + _SLICE)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end


def _control_tokens(tokenizer: Any, template: str) -> set[str]:
    """Return the added tokens that structure a chat. Others, such as Gemma's `<table>`, are ordinary text that happens
    to be one token each."""
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values() if token.content.strip()}
    if not template:  # a template in Python has no readable source
        return set(added)
    inferred = tokenizer._get_control_tokens(template)
    return {text for text in added if text in inferred or _DELIMITER.fullmatch(text)}


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of these texts. It is built from a trie, since Llama has 256 control
    tokens with a common prefix, and trying each at every "<" of a long text would take minutes."""
    trie: Trie = {}
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_branches(trie) if trie else r"(?!)")


def _branches(trie: Trie) -> str:
    longer = [re.escape(char) + _branches(rest) for char, rest in sorted(trie.items()) if char]
    if not longer:
        return ""
    either = longer[0] if len(longer) == 1 and "" not in trie else f"(?:{'|'.join(longer)})"
    return f"{either}?" if "" in trie else either
