"""Rows that join and leave in place. The oracles are mlx-lm's: one request alone, and its own batch caches."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from tests.engine.tiny import FAMILIES, alone, network, prompt
from tests.selection import examples
from worker.engine.cache.kv import SlotKVCache
from worker.engine.cache.layers import layers
from worker.engine.cache.rotating import SlotRotatingKVCache
from worker.engine.cache.slots import (
    RowCache,
    batch_of,
    bytes_of,
    compact_order,
    growth,
    join,
    join_all,
    materialize,
    restore,
    select_rows,
    snapshot,
    step_growth,
    tighten,
)
from worker.engine.memory import UNLIMITED_TOKENS
from worker.engine.upstream.mlx_lm import make_prompt_cache

LENGTHS = (1, 3, 9, 16, 17, 30, 45)  # around the tiny models' window of 16
ANSWER = 24


class Row(NamedTuple):
    family: str
    prompt: tuple[int, int]  # tokens, seed
    said: list[int]

    def is_right(self) -> bool:
        expected = answer(self.family, self.prompt)
        return self.said[: len(expected)] == expected[: len(self.said)]


@cache
def answer(family: str, shape: tuple[int, int]) -> list[int]:
    return alone(network(family), prompt(*shape), ANSWER)


class Decoding:
    """The smallest engine there is: prompts alone and in chunks, then a token for each row, greedily."""

    def __init__(self, family: str) -> None:
        self.family, self.network = family, network(family)
        self.batch = batch_of(make_prompt_cache(self.network))
        self.rows: list[Row] = []

    def start(self, tokens: int, seed: int, chunk: int = 11) -> None:
        self.enter(*self.computed(tokens, seed, chunk))

    def computed(self, tokens: int, seed: int, chunk: int = 11) -> tuple[Row, list[Any]]:
        row = make_prompt_cache(self.network)
        for at in range(0, tokens, chunk):
            logits = self.network(mx.array([prompt(tokens, seed)[at : at + chunk]]), cache=row)
        return Row(self.family, (tokens, seed), [int(logits[0, -1].argmax())]), row

    def start_together(self, *shapes: tuple[int, ...]) -> None:
        rows, caches = zip(*(self.computed(*shape) for shape in shapes), strict=True)
        join_all(self.batch, [RowCache(cache) for cache in caches])
        self.rows += rows

    def enter(self, row: Row, computed: list[Any], position: int | None = None) -> None:
        join(self.batch, computed, position)
        self.rows.append(row)

    def step(self) -> None:
        tokens = mx.array([row.said[-1] for row in self.rows])
        logits = self.network(tokens[:, None], cache=self.batch)[:, -1]
        for row, token in zip(self.rows, logits.argmax(-1).tolist(), strict=True):
            row.said.append(token)

    def keep(self, places: list[int]) -> None:
        select_rows(self.batch, places)
        self.rows = [self.rows[place] for place in places]

    def leave(self, place: int) -> Row:
        row = self.rows[place]
        self.keep(compact_order(len(self.rows), {place}))
        return row

    def preempt(self, place: int) -> tuple[Row, RowCache]:
        kept = snapshot(self.batch, place)
        return self.leave(place), kept


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_that_a_join_copies_are_predicted(family: str) -> None:
    table = Decoding(family)
    for seed, tokens in enumerate((9, 9, 40, 9, 300, 17, 9, 9, 310, 9)):
        foretold, before = growth(table.batch, tokens), [(shape(each), each.nbytes) for each in layers(table.batch)]
        table.start(tokens, seed, chunk=512)
        after = [(shape(each), each.nbytes) for each in layers(table.batch)]
        copied = 0
        for (old, old_bytes), (new, new_bytes) in zip(before, after, strict=True):
            if old is None:  # a state, which every join copies
                copied += old_bytes
            elif old and old != new:
                copied += new_bytes
        assert foretold == copied
        table.step()


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_that_a_step_copies_are_predicted(family: str) -> None:
    table = Decoding(family)
    table.start_together((225, 0, 512), (9, 1))  # with spare room, buffers of 256 tokens
    grown = 0
    for _ in range(40):
        foretold, before = step_growth(table.batch), [shape(each) for each in layers(table.batch)]
        table.step()
        copied = sum(each.nbytes for old, each in zip(before, layers(table.batch), strict=True) if old != shape(each))
        assert foretold == copied
        grown += copied > 0
    if any(type(each) is SlotKVCache for each in layers(table.batch)):
        assert grown == 1


def shape(layer: Any) -> tuple[int, ...] | None:
    """Return the shape of a layer's keys: empty before there are any, None if it has no keys."""
    if not isinstance(layer, SlotKVCache):
        return None
    return () if layer.keys is None else tuple(layer.keys.shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_join_together_equal_their_answers_alone(family: str) -> None:
    table = Decoding(family)
    table.start_together((9, 0), (30, 1), (17, 2))
    table.step()
    table.start_together((45, 3), (3, 4))
    for _ in range(4):
        table.step()
    assert all(row.is_right() for row in table.rows)


def test_buffers_grow_once_for_rows_that_join_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rebuild = SlotKVCache._rebuild
    rebuilt = list[tuple[int, int]]()

    def record(layer: SlotKVCache, size: tuple[int, int], *tokens: mx.array) -> None:
        rebuilt.append(size)
        rebuild(layer, size, *tokens)

    monkeypatch.setattr(SlotKVCache, "_rebuild", record)
    table = Decoding("llama")
    table.start_together(*((9, seed) for seed in range(20)))
    assert len(rebuilt) == len(table.batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_row_equals_its_answer_alone_while_others_join_and_leave(family: str) -> None:
    rng, table = random.Random(family), Decoding(family)
    preempted: list[tuple[Row, RowCache]] = []
    ended: list[Row] = []
    for seed in range(16):
        if len(table.rows) < 2 or rng.random() < 0.4:
            table.start(rng.choice(LENGTHS), seed)
        table.step()
        place, rows = rng.randrange(len(table.rows)), list(range(len(table.rows)))
        match rng.choice(["leave", "park", "resume", "resume", "shuffle", "stay"]):
            case "leave":
                ended.append(table.leave(place))
            case "park":
                preempted.append(table.preempt(place))
            case "resume" if preempted:
                row, kept = preempted.pop(rng.randrange(len(preempted)))
                table.enter(row, restore(kept), kept.position)
            case "shuffle":
                table.keep(rng.sample(rows, len(rows)))
    everyone = [*ended, *table.rows, *(row for row, _ in preempted)]
    assert [row for row in everyone if not row.is_right()] == []


class Comings(RuleBasedStateMachine):
    """Any order of arrivals, steps, departures, parkings and returns."""

    @initialize(family=st.sampled_from(["gemma3", "qwen3_5"]))
    def open(self, family: str) -> None:
        self.table = Decoding(family)
        self.preempted: list[tuple[Row, RowCache]] = []

    @rule(tokens=st.sampled_from([3, 16, 30]), seed=st.integers(0, 1))
    def arrive(self, tokens: int, seed: int) -> None:
        self.table.start(tokens, seed)

    @precondition(lambda self: self.table.rows)
    @rule(steps=st.sampled_from([1, 2, 7]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.table.step()

    @precondition(lambda self: self.table.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        places = st.permutations(range(len(self.table.rows)))
        self.table.keep(data.draw(places)[data.draw(st.integers(0, 2)) :])

    @precondition(lambda self: self.table.rows)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.preempted.append(self.table.preempt(data.draw(st.integers(0, len(self.table.rows) - 1))))

    @precondition(lambda self: self.preempted)
    @rule()
    def resume(self) -> None:
        row, kept = self.preempted.pop(0)
        self.table.enter(row, restore(kept), kept.position)

    @invariant()
    def each_says_what_it_says_alone(self) -> None:
        assert [row for row in self.table.rows if not row.is_right()] == []


TestComings = Comings.TestCase
TestComings.settings = settings(max_examples=examples(8, by_default=2), stateful_step_count=16, deadline=None)


# Compare with upstream's batches which tokens a row attends to. Keys and values are the number of their token.


def counted(tokens: int, first: int) -> mx.array:
    numbers = mx.arange(first, first + tokens, dtype=mx.float32)
    return mx.broadcast_to(numbers[None, None, :, None], (1, 2, tokens, 4))


def row_of(kind: Callable[[], Any], tokens: int, first: int = 1) -> Any:
    row = kind()
    row.update_and_fetch(counted(tokens, first), -counted(tokens, first)[..., :3])
    return row


def outputs(batch: Any, token: int, window: int | None) -> list[list[float]]:
    """Feed every row its next token, and return the numbers that each row attends to, sorted. `token` differs per
    step."""
    rows = batch.offset.shape[0]
    mask = batch.make_mask(1, window_size=window)
    fed = mx.full((rows, 2, 1, 4), token)
    keys, values = batch.update_and_fetch(fed, -fed[..., :3])
    columns = keys.shape[2]
    mask = mx.broadcast_to(mx.array(True) if mask is None else mask, (rows, 1, 1, columns))
    assert values.shape == (rows, 2, columns, 3)
    assert mx.array_equal(keys[..., :3] * mask.swapaxes(2, 3), -values * mask.swapaxes(2, 3))
    return [
        sorted(number for number, sees in zip(row, shown, strict=True) if sees)
        for row, shown in zip(keys[:, 1, :, 0].tolist(), mask[:, 0, 0].tolist(), strict=True)
    ]


ONE_OF_THESE = pytest.mark.parametrize(
    ("kind", "window"),
    [(KVCache, None), (KVCache, 5), (lambda: RotatingKVCache(8), 8), (lambda: RotatingKVCache(8), 5)],
    ids=["full", "full, masked to a window", "ring", "ring, masked to less"],
)


@ONE_OF_THESE
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_row_attends_to_the_same_tokens_as_in_upstreams_batch(
    kind: Callable[[], Any], window: int | None, data: st.DataObject
) -> None:
    ours: Any = None
    for step in range(data.draw(st.integers(1, 12))):
        if ours is None or data.draw(st.booleans()):
            row = row_of(kind, data.draw(st.integers(1, 20)), first=1000 * (step + 1))
            if ours is None:
                (ours,), theirs = batch_of([row]), row.merge([row])
            else:
                ours.extend([row], [None], [UNLIMITED_TOKENS])
                theirs.extend(row.merge([row]))
        elif data.draw(st.booleans()):
            places = data.draw(st.permutations(range(ours.rows)))[: data.draw(st.integers(1, ours.rows))]
            ours.filter(places)
            theirs.filter(places)
        assert outputs(ours, 100 + step, window) == outputs(theirs, 100 + step, window)
        assert ours.offset.tolist() == theirs.offset.tolist()
        place = data.draw(st.integers(0, ours.rows - 1))
        mine, its = ours.extract(place), theirs.extract(place)
        assert type(mine) is type(its)
        assert mx.array_equal(mine.keys, its.keys)
        assert mx.array_equal(mine.values, its.values)
        assert (mine.offset, mine.size()) == (its.offset, its.size())


def test_row_with_dropped_tokens_keeps_its_position_also_after_preemption() -> None:
    table = Decoding("gemma3")
    table.start(9, 1)
    sparse = make_prompt_cache(table.network)
    logits = table.network(mx.array([prompt(12, 2)]), cache=sparse)
    lonely = [layer.merge([layer]) for layer in make_prompt_cache(table.network)]
    table.network(mx.array([prompt(12, 2)]), cache=lonely)
    for layer in lonely:
        layer.offset = mx.array([300])
    token = int(logits[0, -1].argmax())
    table.enter(Row("gemma3", (12, 2), [token]), sparse, position=300)
    expected = [token]
    for step in range(12):
        logits = table.network(mx.array([[expected[-1]]]), cache=lonely)
        expected.append(int(logits[0, -1].argmax()))
        table.step()
        if step == 5:
            row, kept = table.preempt(1)
            assert kept.position == 306
            table.enter(row, restore(kept), kept.position)
    dense, sparse_row = table.rows
    assert dense.is_right()
    assert sparse_row.said == expected


def test_a_snapshot_may_be_restored_twice_and_prefilled_further() -> None:
    for family in ("gemma3", "qwen3_5"):
        table = Decoding(family)
        table.start(20, 3)
        table.step()
        row, kept = table.preempt(0)
        fed = (*prompt(20, 3), row.said[0])
        expected = alone(table.network, (*fed, 7, 8, 9), 6)
        for _ in range(2):
            again = restore(kept)
            logits = table.network(mx.array([[7, 8, 9]]), cache=again)
            assert int(logits[0, -1].argmax()) == expected[0]


# In place


def filled(rows: int, tokens: int, spare: int) -> list[Any]:
    """Return four layers with these rows, and buffers for `spare` more."""
    batch = batch_of([KVCache() for _ in range(4)])
    for _ in range(rows + spare):
        join(batch, wide_row(tokens))
    select_rows(batch, range(rows))
    materialize(batch)
    return batch


def wide_row(tokens: int) -> list[Any]:
    row = [KVCache() for _ in range(4)]
    for layer in row:
        layer.update_and_fetch(mx.ones((1, 2, tokens, 64)), mx.ones((1, 2, tokens, 64)))
    materialize(row)
    return row


def fed(batch: list[Any], token: float | mx.array = 1.0) -> list[mx.array]:
    """Return a lazy step that reads all keys."""
    new = mx.full((batch[0].rows, 2, 1, 64), token)
    return [layer.update_and_fetch(new, new)[0].sum() for layer in batch]


def more_memory(doing: Callable[[], object]) -> int:
    """At the peak, beyond what was allocated before."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    doing()
    mx.synchronize()
    return int(mx.get_peak_memory() - before)


def test_joining_copies_no_other_row() -> None:
    batch, row = filled(24, 200, spare=1), wide_row(200)
    assert more_memory(lambda: join(batch, row)) < bytes_of(batch) / 24


def test_joining_copies_no_other_row_while_a_step_is_running() -> None:
    batch, row = filled(24, 200, spare=1), wide_row(200)
    busy = mx.ones((600, 600))

    def step_and_join() -> None:
        mx.async_eval(fed(batch, (busy @ busy).min()))
        join(batch, row)

    assert more_memory(step_and_join) < bytes_of(batch) / 10


def test_leaving_copies_one_row() -> None:
    batch = filled(24, 200, spare=0)

    def leave() -> None:
        select_rows(batch, compact_order(24, {3}))
        materialize(batch)

    assert more_memory(leave) < bytes_of(batch) / 8


def test_copies_of_leaving_rows_take_no_more_than_the_buffers_of_a_layer() -> None:
    batch = filled(24, 200, spare=0)
    numbers = mx.arange(24, dtype=mx.float32)[:, None, None, None] * mx.ones((24, 2, 1, 64))
    for layer in batch:
        layer.update_and_fetch(numbers, numbers)
    materialize(batch)
    order = compact_order(24, set(range(11)))

    def leave() -> None:
        select_rows(batch, order)
        materialize(batch)

    assert more_memory(leave) < 1.1 * bytes_of(batch) / 4
    assert [layer.keys_and_values()[1][:, 1, 200, 3].tolist() for layer in batch] == [order] * 4


def test_step_writes_into_existing_buffers() -> None:
    batch = filled(24, 200, spare=0)

    def step() -> None:
        for layer in batch:
            new = mx.ones((24, 2, 1, 64))
            layer.update_and_fetch(new, new)
        materialize(batch)

    assert more_memory(step) < bytes_of(batch) / 24


def test_growing_duplicates_one_buffer_at_a_time() -> None:
    batch, row = filled(24, 200, spare=0), wide_row(600)
    before = bytes_of(batch)
    extra = more_memory(lambda: join(batch, row))
    assert bytes_of(batch) > before
    assert extra < bytes_of(batch) - before + before / 3


def test_memory_is_freed_when_rows_leave() -> None:
    batch = filled(24, 200, spare=0)
    full = bytes_of(batch)
    select_rows(batch, range(4))
    assert bytes_of(batch) <= full / 4
    select_rows(batch, [])
    assert bytes_of(batch) == 0
    join(batch, wide_row(10))
    assert batch[0].rows == 1


def test_buffers_have_no_columns_beyond_the_end_of_the_longest_row() -> None:
    batch, bounded = batch_of(wide_row(500)), batch_of(wide_row(500), end=510)
    assert [layers_wide(each) for each in (batch, bounded)] == [768, 512]
    join(bounded, wide_row(700), end=760)
    assert layers_wide(bounded) == 768
    select_rows(bounded, [0])
    join(bounded, wide_row(300), end=320)
    join(bounded, wide_row(300), end=320)
    assert layers_wide(bounded) == 512, "the row that might have become longer has left"


def layers_wide(batch: list[Any]) -> int:
    """Columns."""
    return int(batch[0].keys.shape[2])


def test_tighten_frees_memory_of_rows_that_left() -> None:
    batch = filled(24, 200, spare=0)
    select_rows(batch, range(16))
    before, fresh = bytes_of(batch), bytes_of(filled(16, 200, spare=0))
    rows = [buffer[:16].tolist() for buffer in batch[0].keys_and_values()]
    tighten(batch)
    assert fresh <= bytes_of(batch) < before
    assert [buffer.tolist() for buffer in batch[0].keys_and_values()] == rows
    buffers = [layer.keys for layer in batch]
    tighten(batch)
    assert all(layer.keys is keys for layer, keys in zip(batch, buffers, strict=True))


def test_memory_is_freed_when_the_longest_row_leaves() -> None:
    batch = batch_of(wide_row(4000))
    for _ in range(3):
        join(batch, wide_row(100))
    full = bytes_of(batch)
    select_rows(batch, compact_order(4, {0}))
    assert bytes_of(batch) < full / 4
    assert batch[0].keys_and_values()[0].shape == (3, 2, 100, 64)


def test_snapshot_owns_only_its_memory() -> None:
    batch = filled(16, 200, spare=0)
    others = mx.get_active_memory() - bytes_of(batch)
    kept = snapshot(batch, 5)
    assert kept.nbytes == 4 * 2 * (2 * 200 * 64 * 4)  # layers, keys and values, float32
    batch.clear()
    assert mx.get_active_memory() - others < kept.nbytes + (1 << 16)


def test_lazy_graph_does_not_grow_with_the_steps_of_a_batch() -> None:
    def pending(array: mx.array) -> int:
        lines: list[str] = []

        class Lines:
            def write(self, text: str) -> None:
                lines.append(text)

        mx.export_to_dot(Lines(), array)
        return "".join(lines).count("->")

    batch = filled(3, 8, spare=0)
    mx.eval(fed(batch))
    early = pending(batch[0].offset)
    for _ in range(50):
        mx.eval(fed(batch))
    assert pending(batch[0].offset) == early


# What must not spread


@pytest.mark.parametrize("kind", [KVCache, lambda: RotatingKVCache(32)], ids=["full", "ring"])
def test_row_of_nan_does_not_affect_the_next_row_in_its_slot(kind: Callable[[], Any]) -> None:
    def row(tokens: int, number: float) -> list[Any]:
        layer = kind()
        layer.update_and_fetch(mx.full((1, 2, tokens, 4), number), mx.full((1, 2, tokens, 4), number))
        return [layer]

    (layer,) = batch = batch_of(row(30, 1.0))
    join(batch, row(30, 1.0))
    join(batch, row(30, float("nan")))
    select_rows(batch, [0, 1])
    join(batch, row(3, 1.0))
    ones = mx.ones((3, 2, 1, 4))
    mask = layer.make_mask(1)
    keys, values = layer.update_and_fetch(ones, ones)
    attended = mx.fast.scaled_dot_product_attention(ones, keys, values, scale=1.0, mask=mask)
    assert mx.allclose(attended, ones)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "falcon_h1"])
def test_a_row_that_fails_to_join_harms_no_other(family: str) -> None:
    table = Decoding(family)
    table.start(9, 1)
    table.start(17, 2)
    broken = make_prompt_cache(table.network)
    table.network(mx.array([prompt(30, 3)]), cache=broken)
    last = list(layers(broken))[-1]
    last.keys = last.keys[..., :5]  # of a width that fits no slot
    with pytest.raises(ValueError, match="broadcast|shape"):
        join(table.batch, broken)
    for _ in range(8):
        table.step()
    table.start(3, 4)
    table.step()
    assert all(row.is_right() for row in table.rows)


def test_row_without_tokens_cannot_join() -> None:
    batch = batch_of([KVCache()])
    with pytest.raises(ValueError, match="computed a token"):
        join(batch, [KVCache()])


@pytest.mark.parametrize("layer", [QuantizedKVCache(), RotatingKVCache(8, keep=4)])
def test_layer_without_a_slot_variant_is_refused_by_name(layer: Any) -> None:
    with pytest.raises(NotImplementedError, match=type(layer).__name__):
        batch_of([layer])


@given(rows=st.integers(1, 40), data=st.data())
def test_no_more_rows_move_than_leave(rows: int, data: st.DataObject) -> None:
    leaving = data.draw(st.sets(st.integers(0, rows - 1)))
    places = compact_order(rows, leaving)
    assert sorted(places) == [place for place in range(rows) if place not in leaving]
    assert sum(place != i for i, place in enumerate(places)) <= len(leaving)


def test_layers_become_slots_one_by_one() -> None:
    kinds = {type(layer).__name__ for layer in layers(batch_of(make_prompt_cache(network("falcon_h1"))))}
    assert kinds == {"SlotArraysCache", "SlotKVCache"}
    kinds = {type(layer) for layer in layers(batch_of(make_prompt_cache(network("gemma3n"))))}
    assert kinds == {SlotKVCache, SlotRotatingKVCache}
