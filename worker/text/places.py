"""From places in a prompt's text to places among its tokens."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate, pairwise
from unicodedata import normalize

from worker.text.detokenize import Vocabulary

Form = Callable[[str], str]

_SPACE = b" \t\n\v\f\r"
_FORMS: tuple[Form, ...] = (str, partial(normalize, "NFC"))  # in which tokens may spell a text: as it is, or as Qwen's


class Places:
    """A worker has one."""

    def __init__(self, vocabulary: Vocabulary, tokens: int) -> None:
        """`tokens`: how many the tokenizer has."""
        self._spelled = [_squeezed(vocabulary.bytes_of(token)) for token in range(tokens)]

    def counts(
        self, text: str, tokens: Sequence[int], places: Collection[int], plain: Form = str
    ) -> dict[int, int] | None:
        """By place, in characters, the tokens before it; one that reaches beyond it is not among them. None where
        these tokens do not spell this text. `plain` tells what a piece of it says.

        Space aside, which some tokenizers add or swallow. So the tokens of nothing but space that stand before a
        place do not count either, which is as well: they often grow together with what follows.
        """
        spelled = [self._spelled[token] for token in tokens]
        whole = b"".join(spelled)
        order = sorted({*places, len(text)})
        for form in _FORMS:
            said = (form(plain(text[a:b])) for a, b in pairwise([0, *order]))
            pieces = [_squeezed(piece.encode("utf-8", "surrogatepass")) for piece in said]
            if b"".join(pieces) == whole:
                ends = _ends(spelled)
                return {place: _count(ends, length) for place, length in zip(order, _ends(pieces), strict=True)}
        # Another normalizer changed it, or the vocabulary is written in an alphabet that we do not know.
        return None


def _squeezed(written: bytes) -> bytes:
    return written.translate(None, _SPACE)


def _ends(pieces: list[bytes]) -> list[int]:
    return list(accumulate(map(len, pieces)))


def _count(ends: list[int], length: int) -> int:
    reached = bisect_left(ends, length)
    return reached + 1 if ends[reached] == length else reached
