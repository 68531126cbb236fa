"""Logits processors: bias, penalties and grammars, applied to the logits of a batch before its tokens are drawn.

One call of each kind serves all rows that request it. It changes no other row, and gives each the bits that it would
have alone."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Protocol, cast

import mlx.core as mx

from worker.request import GenerationRequest, GrammarState, Sampling

# Takes the logits of a forward (rows, vocab), which it may overwrite, and the tokens that were fed to it (rows,).
# Returns the processed logits, lazily.
Processor = Callable[[mx.array, mx.array], mx.array]


class _ProcessedRow(Protocol):
    """The part of a row that processors use."""

    request: GenerationRequest
    prompt_ids: mx.array | None

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer so far."""


Rows = Mapping[int, _ProcessedRow]  # rows by their index in the batch


def needs_prompt(sampling: Sampling) -> bool:
    """Return True if the tokens of the prompt matter to a processor, so the row must have `prompt_ids`."""
    return sampling.repetition_penalty != 1


def processors_for(rows: Sequence[_ProcessedRow], fed_drawn: Sequence[bool]) -> list[Processor]:
    """Return the logits processors of a batch, in the order of application. Each must be called once for every forward,
    from the next one on, until the rows change.

    `fed_drawn`: for each row, True if the next forward feeds it a token that it has drawn, False if it feeds the last
    token of `row.request.tokens`. The grammars must have accepted the answers so far. Those that are free accept the
    next ones elsewhere: see `GrammarState.is_free`."""
    samplings = {index: row.request.sampling for index, row in enumerate(rows)}
    chosen: list[Processor] = []
    if biased := {index: each.logit_bias for index, each in samplings.items() if each.logit_bias}:
        chosen.append(_bias(biased))
    if repetitive := {index: rows[index] for index, each in samplings.items() if needs_prompt(each)}:
        chosen.append(_Repetition(repetitive))
    if counted := {i: rows[i] for i, each in samplings.items() if each.presence_penalty or each.frequency_penalty}:
        chosen.append(_Counted(counted, [fed_drawn[index] for index in counted]))
    # The last, so that no bias allows what a grammar forbids.
    every = {index: row.request.grammar for index, row in enumerate(rows) if row.request.grammar}
    if grammars := {index: grammar for index, grammar in every.items() if not grammar.is_free}:
        chosen.append(_Grammars(grammars, {index for index in grammars if fed_drawn[index]}))
    return chosen


def _bias(pairs: Mapping[int, tuple[tuple[int, float], ...]]) -> Processor:
    """Add OpenAI's logit bias: (token, value) pairs by the index of the row."""
    rows = mx.array([index for index, biases in pairs.items() for _ in biases])
    tokens = mx.array([token for biases in pairs.values() for token, _ in biases])
    values = mx.array([value for biases in pairs.values() for _, value in biases])
    return lambda logits, fed: logits.at[rows, tokens].add(values)


class _Repetition:
    """Divide the logits of tokens that occur in prompt or answer (Keskar et al., arXiv 1909.05858); negative ones are
    multiplied."""

    def __init__(self, rows: Rows) -> None:
        self._rows = mx.array([*rows])
        penalties = [row.request.sampling.repetition_penalty for row in rows.values()]
        # Nothing can be divided by 0; in float16 the result may still overflow.
        self._penalties = mx.maximum(_floats(penalties), 1e-6)
        # Tokens that occur, some of them several times, and the place in `_rows` of the row of each.
        prompts = [(place, row.prompt_ids) for place, row in enumerate(rows.values()) if row.prompt_ids is not None]
        answers = [(place, mx.array(row.answer)) for place, row in enumerate(rows.values()) if row.answer]
        self._tokens = mx.concatenate([tokens for _, tokens in prompts + answers])
        self._places = mx.concatenate([mx.full(tokens.size, place) for place, tokens in prompts + answers])

    def __call__(self, logits: mx.array, fed: mx.array) -> mx.array:
        self._tokens = mx.concatenate([self._tokens, fed[self._rows].astype(mx.int32)])
        self._places = mx.concatenate([self._places, mx.arange(self._rows.size)])
        rows, penalties = self._rows[self._places], self._penalties[self._places].astype(logits.dtype)
        occurring = logits[rows, self._tokens]
        logits[rows, self._tokens] = mx.where(occurring < 0, occurring * penalties, occurring / penalties)
        return logits


class _Counted:
    """Subtract OpenAI's presence and frequency penalties, over the answer without the prompt."""

    def __init__(self, rows: Rows, fed_drawn: Sequence[bool]) -> None:
        self._rows = mx.array([*rows])
        self._presence = _floats([row.request.sampling.presence_penalty for row in rows.values()])
        self._frequency = _floats([row.request.sampling.frequency_penalty for row in rows.values()])
        self._fed_counts = _floats(fed_drawn)  # of each row: 1 if the fed token belongs to its answer
        # Slots: a token, its count, and the place in `_rows` of its row. Only one slot of a token has a count above 0.
        slots = [(*each, place) for place, row in enumerate(rows.values()) for each in Counter(row.answer).items()]
        tokens, counts, places = zip(*(slots or [(0, 0, 0)]), strict=True)
        self._tokens, self._counts = mx.array(tokens), _floats(counts)
        self._places = mx.array(places)

    def __call__(self, logits: mx.array, fed: mx.array) -> mx.array:
        self._count(fed[self._rows].astype(mx.int32))
        present = self._presence[self._places] * (self._counts > 0)
        penalties = self._frequency[self._places] * self._counts + present
        return logits.at[self._rows[self._places], self._tokens].add(-penalties.astype(logits.dtype))

    def _count(self, fed: mx.array) -> None:
        """Count a token of each row: in its slot if it has one, else in a new slot."""
        has_slot = (self._tokens == fed[self._places]) & (self._counts > 0)
        again = has_slot * self._fed_counts[self._places]
        new = self._fed_counts.at[self._places].subtract(again)
        self._tokens = mx.concatenate([self._tokens, fed])
        self._counts = mx.concatenate([self._counts + again, new])
        self._places = mx.concatenate([self._places, mx.arange(self._rows.size)])
        self._fed_counts = mx.ones(self._rows.size)


def _floats(values: Iterable[float]) -> mx.array:
    return mx.array([*values], dtype=mx.float32)


class _Grammars:
    """Advance each row's grammar by the fed token, and mask what it then forbids.

    A call blocks until the fed tokens are known. Meanwhile, and while the host fills the masks, the device computes the
    logits."""

    def __init__(self, grammars: Mapping[int, GrammarState], fed_drawn: Set[int]) -> None:
        """`grammars`: by the row's index in the batch. `fed_drawn`: rows of which the next fed token is new to the
        grammar; those fed later always are."""
        self._grammars = grammars
        self._fed_drawn = fed_drawn

    def __call__(self, logits: mx.array, fed: mx.array) -> mx.array:
        """Return the logits (rows, vocab) with -inf for the forbidden tokens. `fed`: (rows,)."""
        mx.async_eval(logits)
        tokens = cast("list[int]", fed.tolist())
        for index in self._fed_drawn:
            self._grammars[index].accept(tokens[index])
        self._fed_drawn = self._grammars.keys()
        masks = {index: grammar.bitmask() for index, grammar in self._grammars.items()}
        return masked(logits, {index: mask for index, mask in masks.items() if mask is not None})


def masked(logits: mx.array, masks: Mapping[int, bytes]) -> mx.array:
    """Return the logits (rows, vocab) with -inf for the tokens that these masks, by row, do not allow. May overwrite
    `logits`. Lazy."""
    if not masks:
        return logits
    allowed = _unpacked([*masks.values()], logits.shape[-1])
    if len(masks) == len(logits):
        return mx.where(allowed, logits, -math.inf)  # the masks are in the rows' order
    rows = mx.array([*masks])
    logits[rows] = mx.where(allowed, logits[rows], -math.inf)
    return logits


def _unpacked(masks: list[bytes], width: int) -> mx.array:
    """Return the masks as booleans (masks, width). Tokens beyond the end of a mask are not allowed."""
    size = -(-width // 32) * 4
    words = memoryview(b"".join(mask[:size].ljust(size, b"\0") for mask in masks)).cast("I")
    bits = mx.array(words)[:, None] & mx.array([1 << bit for bit in range(32)], dtype=mx.uint32)  # type: ignore[arg-type]
    return (bits != 0).reshape(len(masks), -1)[:, :width]
