"""The bare forward: mlx-lm's model without a server or a scheduler, as the measure of what a machine can do."""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.benchmarks.serve.figures import Answer

DECODES = (1, 4, 8, 16, 32)  # rows of one token
PREFILLS = ((1, 16), (1, 64), (1, 256), (8, 16), (32, 16))  # rows, tokens
ROWS = 32
_CONTEXT = 64  # tokens of each row before it decodes
_STEPS = 12  # timed decode steps
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Bare:
    """Seconds of bare forwards, and the prompts' lengths as this model's tokenizer and template make them."""

    decode_s: dict[int, float]  # rows → seconds of a step
    prefill_s: dict[tuple[int, int], float]  # (rows, tokens) → seconds of the forward
    template_tokens: float  # of a prompt without words
    tokens_per_word: float

    @property
    def packed_s(self) -> float:
        """Seconds of a prompt token in the cheapest forward of several rows."""
        return min(seconds / (rows * tokens) for (rows, tokens), seconds in self.prefill_s.items() if rows > 1)

    def step_s(self, rows: float) -> float:
        """Return the seconds of a decode step, interpolated between the measured numbers of rows."""
        return _interpolate(self.decode_s, rows)

    def alone_s(self, tokens: float) -> float:
        """Return the seconds of a prompt of this many tokens in one forward of its own."""
        alone = {count: seconds for (rows, count), seconds in self.prefill_s.items() if rows == 1}
        return _interpolate({1: self.decode_s[1], **alone}, tokens)

    def work_s(self, prompt_tokens: float, tokens: float, rows: int) -> float:
        """Return the seconds that these tokens need: prompts packed, and then `rows` rows decoding.

        A prompt's forward yields the first token of its answer; for a single row, prompts are not packed.
        """
        prefill = self.alone_s(prompt_tokens) if rows == 1 else prompt_tokens * self.packed_s
        return prefill + tokens * self.step_s(rows) / rows

    def answers_s(self, answers: Iterable[Answer], rows: int) -> float:
        """Return the seconds of all computed prompt tokens and all tokens after each answer's first."""
        work = [(answer.prompt_tokens - (answer.cached_tokens or 0), max(0, answer.tokens - 1)) for answer in answers]
        if rows == 1:
            return sum(self.work_s(prompt, tokens, 1) for prompt, tokens in work)
        return self.work_s(sum(prompt for prompt, _ in work), sum(tokens for _, tokens in work), rows)

    def words_of(self, tokens: int) -> int:
        """Return the words of a prompt that has about this many tokens with its template."""
        return max(1, round((tokens - self.template_tokens) / self.tokens_per_word))

    def as_json(self) -> dict[str, Any]:
        """Return the measured milliseconds by shape."""
        shapes = {f"{rows} x 1": seconds for rows, seconds in self.decode_s.items()}
        shapes |= {f"{rows} x {tokens}": seconds for (rows, tokens), seconds in self.prefill_s.items()}
        return {shape: round(seconds * 1000, 2) for shape, seconds in shapes.items()}


def _interpolate(points: dict[int, float], at: float) -> float:
    """Interpolate linearly between points, and extrapolate from the nearest two; below the first, return its value."""
    ordered = sorted(points.items())
    if at <= ordered[0][0]:
        return ordered[0][1]
    pairs = list(pairwise(ordered))
    (low, low_s), (high, high_s) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    return low_s + (high_s - low_s) * (at - low) / (high - low)


def measure(checkpoint: Path, texts: tuple[str, str]) -> Bare:
    """Measure in a new process, since OpenBLAS reads its number of threads when it is loaded.

    `texts`: a short and a long prompt, by which words are converted to tokens.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, checkpoint, texts).result()


def _measure(checkpoint: Path, texts: tuple[str, str]) -> Bare:
    import mlx_lm

    network, tokenizer, *_ = mlx_lm.load(str(checkpoint))
    decode_s = {rows: _decode_s(network, rows) for rows in DECODES}
    prefill_s = {shape: _median(partial(_prefill_s, network, *shape)) for shape in PREFILLS}
    return Bare(decode_s, prefill_s, *_tokens_of(tokenizer, texts))


def _tokens_of(tokenizer: Any, texts: tuple[str, str]) -> tuple[float, float]:
    """Return the tokens of a prompt without words, and those of each word."""
    messages = ([{"role": "user", "content": text}] for text in texts)
    short, long = (len(tokenizer.apply_chat_template(each, add_generation_prompt=True)) for each in messages)
    few, many = (len(text.split()) for text in texts)
    per_word = (long - short) / (many - few)
    return short - few * per_word, per_word


def _forward(network: Any, cache: Any, rows: int, tokens: int) -> float:
    import mlx.core as mx

    inputs = mx.random.randint(10, 500, (rows, tokens))
    mx.eval(inputs)
    began = time.perf_counter()
    mx.eval(network(inputs, cache=cache), [each.state for each in cache])
    return time.perf_counter() - began


def _cache(network: Any) -> Any:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(network)


def _prefill_s(network: Any, rows: int, tokens: int) -> float:
    return _forward(network, _cache(network), rows, tokens)


def _decode_s(network: Any, rows: int) -> float:
    cache = _cache(network)
    _forward(network, cache, rows, _CONTEXT)
    _forward(network, cache, rows, 1)
    return statistics.median(_forward(network, cache, rows, 1) for _ in range(_STEPS))


def _median(timed: Callable[[], float]) -> float:
    timed()  # warm
    return statistics.median(timed() for _ in range(_REPEATS))
