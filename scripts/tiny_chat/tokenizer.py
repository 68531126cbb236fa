"""The byte-level BPE of 1,024 tokens, trained on the world. Every byte is a token, so any Unicode passes."""

from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.tiny_chat.data import draw_chat, render

VOCABULARY = 1024
# Their order is their ids. The vision tokens are never trained: a real Qwen3.5 has them at hand too.
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
]  # fmt: skip
PADDING = SPECIAL_TOKENS.index("<|endoftext|>")
TURN_START = SPECIAL_TOKENS.index("<|im_start|>")
TURN_END = SPECIAL_TOKENS.index("<|im_end|>")
CHATS = 8000


def train_tokenizer(seed: int = 0) -> Tokenizer:
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
    # Digit by digit: a code of four digits is copied, not looked up.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
