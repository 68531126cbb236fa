"""Gives llguidance a tokenizer, and splits long texts that grammars force."""

import logging
from collections.abc import Callable

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from worker.text.tokenizer import Tokenizer, Vocabulary

logger = logging.getLogger("sluice.text")

_MARKER = b"\xff"  # begins a control token in llguidance's texts


class _Words:
    """A tokenizer as llguidance reads it: the bytes of each token, and a function that encodes text.

    llguidance (1.9) tokenizes text that its grammar forces. If a schema's own text looks like a marker, it must not
    become that token, and a normalizer must not compose characters that the schema writes separately. So the function
    encodes literally, and grammars name markers by id.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, encode: Callable[[str], list[int]], count: int):
        self._encode = encode
        self.tokens = list(map(vocabulary.bytes_of, range(count)))
        self.special_token_ids = [*tokenizer.added_tokens.values(), *range(len(tokenizer.tokens), count)]
        self.eos_token_id = min(tokenizer.eos_token_ids, default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def llguidance_tokenizer(tokenizer: Tokenizer, vocabulary: Vocabulary, count: int) -> LLTokenizer | None:
    """Return the tokenizer in llguidance's form, or None if it does not support it. `count`: number of logits.

    llguidance (1.9) does not release the interpreter's lock meanwhile: half a second with a large vocabulary. So it is
    called before the first job. Reading a `tokenizer.json` takes it a second more.
    """
    try:
        if (encode := tokenizer.encode_literally) is None:
            raise ValueError("it is in Python, or the bytes of its tokens are not known")
        words = _Words(tokenizer, vocabulary, encode, count)
        return LLTokenizer(TokenizerWrapper(words), n_vocab=count, eos_token=sorted(tokenizer.eos_token_ids) or None)
    except ValueError as error:
        logger.info(
            "llguidance does not support this tokenizer, so response_format and forced tool calls are refused: %s",
            error,
        )
        return None


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
        begin = text[:256]
        if len(text) <= 512 or _MARKER in begin:  # llguidance tokenizes 512 bytes in a tenth of a millisecond
            return []
        return self._whole(self._split(begin, last), begin)

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
        sure = len(text) - 64  # bytes; the tokens of the others could be other ones
        for token in tokens:
            spelled = self._vocabulary.decode_bytes([token])
            if not spelled or end + len(spelled) > sure or text[end : end + len(spelled)] != spelled:
                break
            end += len(spelled)
            whole.append(token)
        return whole
