"""Forwards of several tokens per row, of which each row keeps its own number: the answers stay those of one request
alone, whatever was drafted."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.tiny import EVERY_FAMILY, alone, network, prompt
from worker.engine.cache import recurrent, slots
from worker.engine.cache.kv import SlotKVCache
from worker.engine.cache.layers import layers
from worker.engine.cache.recurrent import Recurrence, Replay, SlotArraysCache, Stepping
from worker.engine.cache.rotating import SlotRotatingKVCache
from worker.engine.cache.slots import verification
from worker.engine.upstream.mlx_lm import RotatingKVCache, make_prompt_cache
from worker.outcomes import MAX_DRAFT

ANSWER = 30
LENGTHS = (2, 5, 14, 17, 30, 45)  # around the tiny models' window of 16
STEPPED = "rwkv7", "jamba", "recurrent_gemma", "mamba"  # their recurrences are not those that `Replay` records
REPLAYED = "qwen3_5", "mamba2", "kimi_linear", "falcon_h1", "qwen3_next", "nemotron_h", "granitemoehybrid", "lfm2"


def recurrence_of(family: str) -> Recurrence:
    return Stepping(network(family)) if family in STEPPED else Replay(network(family))


@cache
def answer_alone(family: str, tokens: int, seed: int) -> tuple[int, ...]:
    """Return the answer to a prompt alone."""
    return tuple(alone(network(family), prompt(tokens, seed), ANSWER))


class Interrupted(Exception):
    """A forward has failed after it was computed."""


class Verifying:
    """Rows that are drafted by an oracle, which errs at random."""

    def __init__(self, family: str, recurrence: Recurrence, *, max_draft: int = MAX_DRAFT, seed: int = 0) -> None:
        self.family, self.network = family, network(family)
        self.recurrence, self.random = recurrence, random.Random(seed)
        self.batch = slots.empty_batch_of(make_prompt_cache(self.network), max_draft)
        self.truths, self.answers = list[tuple[int, ...]](), list[list[int]]()

    def start(self, tokens: int, seed: int) -> None:
        row = make_prompt_cache(self.network)
        logits = self.network(mx.array([prompt(tokens, seed)]), cache=row)
        slots.join(self.batch, row)
        self.answers.append([int(logits[0, -1].argmax())])
        self.truths.append(answer_alone(self.family, tokens, seed))

    def leave(self, index: int) -> None:
        order = slots.compact_order(len(self.answers), {index})
        slots.select_rows(self.batch, order)
        self.answers = [self.answers[i] for i in order]
        self.truths = [self.truths[i] for i in order]

    def drafts(self) -> list[list[int]]:
        return [self.draft(truth, len(answer)) for truth, answer in zip(self.truths, self.answers, strict=True)]

    def draft(self, truth: Sequence[int], at: int) -> list[int]:
        draft = [*truth[at : at + self.random.randrange(MAX_DRAFT + 1)]]
        if draft and self.random.random() < 0.5:
            draft[self.random.randrange(len(draft))] = self.random.randrange(10, 1000)
        return draft

    def step(self) -> None:
        drafts = self.drafts()
        width = 1 + max(map(len, drafts))
        fed = [[answer[-1], *draft] for answer, draft in zip(self.answers, drafts, strict=True)]
        tokens = mx.array([[*each, *[each[-1]] * (width - len(each))] for each in fed])
        if width == 1:
            drawn = self.network(tokens, cache=self.batch).argmax(-1).tolist()
            self.deliver([each[:1] for each in drawn])
            return
        with verification(self.batch, width) as verifying:
            with self.recurrence.recording(self.batch):
                drawn = self.network(tokens, cache=self.batch).argmax(-1).tolist()
            kept = [each[: 1 + agreeing(draft, each)] for draft, each in zip(drafts, drawn, strict=True)]
            verifying.commit([*map(len, kept)])
        self.deliver(kept)

    def interrupted(self) -> None:
        with verification(self.batch, 8), self.recurrence.recording(self.batch):
            mx.eval(self.network(mx.full((len(self.answers), 8), 9), cache=self.batch))
            raise Interrupted

    def deliver(self, tokens: Sequence[Sequence[int]]) -> None:
        for answer, new in zip(self.answers, tokens, strict=True):
            answer.extend(new)

    def right(self) -> list[bool]:
        pairs = zip(self.truths, self.answers, strict=True)
        return [tuple(answer[: len(truth)]) == truth[: len(answer)] for truth, answer in pairs]


def agreeing(draft: Sequence[int], drawn: Sequence[int]) -> int:
    return next((i for i, token in enumerate(draft) if token != drawn[i]), len(draft))


def run(table: Verifying, steps: int = 12) -> list[bool]:
    for seed, tokens in enumerate(LENGTHS[:3]):
        table.start(tokens, seed)
    right = list[bool]()
    for step in range(steps):
        table.step()
        if step == 3:
            for seed, tokens in enumerate(LENGTHS[3:], 3):
                table.start(tokens, seed)
        if step == 6:
            right += table.right()
            table.leave(1)
    return right + table.right()


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_drafted_rows_equal_their_answers_alone(family: str) -> None:
    right = run(Verifying(family, recurrence_of(family)))
    assert right == [True] * len(right)


@pytest.mark.parametrize("family", [*REPLAYED, *STEPPED])
def test_rows_stepped_through_their_layers_equal_their_answers_alone(family: str) -> None:
    right = run(Verifying(family, Stepping(network(family)), seed=1))
    assert right == [True] * len(right)


@pytest.mark.parametrize("family", STEPPED)
def test_replay_refuses_a_recurrence_that_it_does_not_know(family: str) -> None:
    with pytest.raises(ValueError, match="recorded|recurrence"):
        run(Verifying(family, Replay(network(family))))


def test_states_without_recurrence_are_refused() -> None:
    with pytest.raises(ValueError, match="recorded"):
        run(Verifying("qwen3_5", Recurrence()))


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "falcon_h1"])
@pytest.mark.parametrize("off", [1, -1])
def test_a_state_with_a_token_too_many_or_too_few_is_noticed(
    family: str, off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = SlotArraysCache.commit
    monkeypatch.setattr(
        SlotArraysCache, "commit", lambda self, counts, clear=(): commit(self, [max(1, n + off) for n in counts], clear)
    )
    assert not all(run(Verifying(family, recurrence_of(family))))


def test_keys_of_a_token_too_many_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = SlotKVCache.commit
    monkeypatch.setattr(
        SlotKVCache, "commit", lambda self, counts, clear=(): commit(self, [n + 1 for n in counts], clear)
    )
    assert not all(run(Verifying("qwen3", Recurrence())))


def test_a_ring_that_is_a_column_short_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotRotatingKVCache, "begin", SlotKVCache.begin)
    assert not all(run(Verifying("gemma3", Recurrence(), max_draft=MAX_DRAFT - 1)))


def test_a_ring_refuses_more_tokens_than_it_has_columns_for() -> None:
    (ring,) = slots.empty_batch_of([RotatingKVCache(16)], max_draft=3)
    ring.begin(4)
    with pytest.raises(ValueError, match="window of 16 takes no 5 tokens"):
        ring.begin(5)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "rwkv7"])
def test_a_forward_that_is_not_committed_changes_nothing(family: str) -> None:
    table = Verifying(family, recurrence_of(family))
    for seed, tokens in enumerate(LENGTHS):
        table.start(tokens, seed)
    for _ in range(3):
        table.step()
    with pytest.raises(Interrupted):
        table.interrupted()
    for _ in range(4):
        table.step()
    assert all(table.right())


def test_a_rejected_token_that_is_not_finite_leaves_nothing_behind() -> None:
    """A mask alone does not hide it, since zero times NaN is NaN."""
    table = Verifying("qwen3", Recurrence())
    table.start(9, 0)
    table.start(5, 1)
    fed = mx.array([[answer[-1], 3, 3, 3] for answer in table.answers])
    with verification(table.batch, 4) as verifying:
        drawn = table.network(fed, cache=table.batch).argmax(-1).tolist()
        for layer in layers(table.batch):
            for row, length in enumerate((9, 5)):
                layer.values[row, :, length + 1 : length + 4] = float("nan")
        verifying.commit([1, 1], clear=[0, 1])
    table.deliver([each[:1] for each in drawn])
    for _ in range(4):
        table.step()
    assert all(table.right())


def test_a_row_leaves_a_wide_ring_as_mlx_lm_would_hold_it() -> None:
    wide, narrow = Verifying("gemma3", Recurrence()), Verifying("gemma3", Recurrence(), max_draft=0)
    for table in wide, narrow:
        table.start(30, 1)
        for _ in range(9):
            logits = table.network(mx.array([[table.answers[0][-1]]]), cache=table.batch)
            table.deliver([[int(logits[0, -1].argmax())]])
    pairs = zip(layers(slots.snapshot(wide.batch, 0).cache), layers(slots.snapshot(narrow.batch, 0).cache), strict=True)
    assert all(_equal(one, other) for one, other in pairs)


def _equal(one: Any, other: Any) -> bool:
    same = [mx.allclose(a, b, atol=1e-5).item() for a, b in ((one.keys, other.keys), (one.values, other.values))]
    return all(same) and one.offset == other.offset


def test_a_convolution_without_a_state_of_its_width_is_refused() -> None:
    with pytest.raises(ValueError, match="has no state"):
        recurrent._window_after(mx.zeros((2, 3, 8)), mx.zeros((2, 5, 9)))


def test_states_are_not_advanced_again_if_every_row_keeps_all_its_tokens() -> None:
    def advance(kept: mx.array) -> mx.array:
        raise AssertionError("the states after the forward are right")

    states = SlotArraysCache(1)
    states[0] = mx.zeros((2, 3))
    states.begin(4)
    states.record(0, advance)
    states[0] = after = mx.ones((2, 3))
    states.commit([4, 4])
    assert states[0] is after
