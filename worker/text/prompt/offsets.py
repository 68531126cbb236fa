"""Maps positions in a prompt's text to token counts."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate, pairwise
from unicodedata import normalize

from worker.text.vocabulary import Vocabulary

Form = Callable[[str], str]

_SPACE = b" \t\n\v\f\r"
# Forms of the text that tokens may spell: unchanged, or in NFC as with Qwen's tokenizer.
_FORMS: tuple[Form, ...] = (str, partial(normalize, "NFC"))


class TokenOffsets:
    """Maps character positions to token counts; a worker has one."""

    def __init__(self, vocabulary: Vocabulary, tokens: int) -> None:
        """`tokens`: the size of the tokenizer's vocabulary."""
        self._spelled = [_without_space(vocabulary.bytes_of(token)) for token in range(tokens)]

    def counts(
        self, text: str, tokens: Sequence[int], places: Collection[int], plain: Form = str
    ) -> dict[int, int] | None:
        """Return, for each position in characters, the number of tokens that end at or before it.

        Returns None if these tokens do not spell this text. `plain` removes the marks from a piece of the text.
        Whitespace is ignored, since some tokenizers add or drop it. So whitespace tokens just before a position are not
        counted; such tokens often merge with the text that follows.
        """
        spelled = [self._spelled[token] for token in tokens]
        whole = b"".join(spelled)
        order = sorted({*places, len(text)})
        for form in _FORMS:
            parts = (form(plain(text[a:b])) for a, b in pairwise([0, *order]))
            pieces = [_without_space(piece.encode("utf-8", "surrogatepass")) for piece in parts]
            if b"".join(pieces) == whole:
                ends = _ends(spelled)
                return {place: _count(ends, length) for place, length in zip(order, _ends(pieces), strict=True)}
        # Another normalizer changed the text, or the vocabulary uses an unknown alphabet.
        return None


def _without_space(written: bytes) -> bytes:
    return written.translate(None, _SPACE)


def _ends(pieces: list[bytes]) -> list[int]:
    return list(accumulate(map(len, pieces)))


def _count(ends: list[int], length: int) -> int:
    reached = bisect_left(ends, length)
    return reached + 1 if ends[reached] == length else reached
