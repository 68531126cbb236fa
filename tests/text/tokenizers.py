"""Tokenizers of the kinds that models have, built here, to count and to compare."""

from collections.abc import Callable
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.stack import TINY_CHAT

_WORDS = ["the", "quick", "model", "token", "ing", "ment", "über", "naïve", "日本語", "🙂", "def f(x):", "\n", "1234"]
_SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = [f"<0x{value:02X}>" for value in range(256)]


def _corpus() -> list[str]:
    lines = [" ".join(_WORDS[(i * j) % len(_WORDS)] for j in range(1, 12)) for i in range(400)]
    return [line + " " * 2 ** (i % 8) + str(i**5) for i, line in enumerate(lines)]


def _qwen() -> Tokenizer:
    """Bytes, words by a regular expression, and long runs of digits and spaces in one word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    split = pre_tokenizers.Split(Regex(_QWEN), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=_SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _llama() -> Tokenizer:
    """The whole text is one word, with a space put before it, and unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    space = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[*_SPECIAL, *_BYTES], max_token_length=16)
    tokenizer.train_from_iterator([line[:120] for line in _corpus()[:100]], trainer)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    tokenizer.train_from_iterator(
        _corpus(), trainers.UnigramTrainer(vocab_size=400, special_tokens=_SPECIAL, unk_token="<unk>")
    )
    return tokenizer


def _tiny_chat() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_CHAT / "tokenizer.json"))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "tiny-chat": _tiny_chat,
    "qwen": _qwen,
    "llama": _llama,
    "unigram": _unigram,
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()
