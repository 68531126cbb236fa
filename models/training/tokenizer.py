"""A byte-level BPE with 1,024 tokens, trained on the chats. Every byte is a token, so it encodes any text."""

from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from models.training.data import draw_chat, render

VOCABULARY = 1024
# The index is the id. The vision tokens are never trained; they are there as in a real Qwen3.5.
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
]  # fmt: skip
PADDING = SPECIAL_TOKENS.index("<|endoftext|>")
TURN_START = SPECIAL_TOKENS.index("<|im_start|>")
TURN_END = SPECIAL_TOKENS.index("<|im_end|>")
CHATS = 8000


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """Return a tokenizer trained on random chats."""
    dice = Random(seed)
    tokenizer = _untrained()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((render(draw_chat(dice, fillers=10)) for _ in range(CHATS)), trainer)
    return tokenizer


def _untrained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Single digits, so that a code of four digits is copied and not memorized.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
