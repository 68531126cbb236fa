"""Predicted memory of rows. Real measurements are in tests/engine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.memory import (
    BUFFER_TOKENS,
    CHUNK,
    DRAWN_AT_ONCE,
    MAX_ROWS,
    NO_IMAGES,
    EncoderCost,
    ImageDemand,
    KVLayers,
    MemoryModel,
    format_bytes,
    padded_shape,
)

PLAIN = MemoryModel(weights_bytes=1_000_000, kv_layers=(KVLayers(token_bytes=100, layer_bytes=10),))
HYBRID = MemoryModel(
    weights_bytes=1_000_000,
    kv_layers=(KVLayers(100, 10), KVLayers(40, 10, window=512)),
    state_bytes=7_000,
    chunk_token_bytes=50,
    score_bytes=2,
    draft_bytes=300_000,
)

costs = st.builds(
    MemoryModel,
    weights_bytes=st.integers(0, 10**9),
    kv_layers=st.lists(
        st.builds(KVLayers, st.integers(1, 10**5), st.integers(1, 10**4), st.none() | st.integers(1, 5000)), max_size=3
    ).map(tuple),
    state_bytes=st.integers(0, 10**6),
    chunk_token_bytes=st.integers(0, 10**5),
    score_bytes=st.integers(0, 100),
    vocab=st.integers(0, 10**6),
    max_draft=st.integers(0, 7),
    draft_bytes=st.integers(0, 10**8),
    factor=st.floats(0.5, 4.0),
)
groups = st.lists(st.lists(st.integers(1, 20_000), max_size=6), max_size=4)


def test_single_row_takes_up_to_one_buffer_step_more() -> None:
    assert PLAIN.row_bytes(1000) == 100 * (1000 + BUFFER_TOKENS - 1)


def test_window_limits_the_bytes_of_a_row_and_state_is_fixed() -> None:
    assert HYBRID.row_bytes(10_000) == 100 * (10_000 + 255) + 40 * 512 + 7_000


def test_every_row_of_a_group_pays_for_the_longest() -> None:
    rows, tokens = padded_shape(3, 2000, max_tokens=2000)
    assert PLAIN.rectangle_bytes([10, 2000, 10]) == rows * tokens * 100
    assert PLAIN.rectangle_bytes([10, 10]) + PLAIN.rectangle_bytes([2000]) < PLAIN.rectangle_bytes([10, 10, 2000])


def test_longer_chunk_takes_more_for_windows_and_scores() -> None:
    assert HYBRID.chunk_bytes(256, 1000) == 256 * (50 + 40 + 2 * 1000)


def test_a_step_draws_from_the_logits_of_each_row_and_of_each_token_of_a_draft() -> None:
    plain = replace(PLAIN, vocab=1000)
    drafted = replace(plain, max_draft=7)
    assert (plain.most_drawn(32), drafted.most_drawn(4)) == (32, 4 * 8)
    assert drafted.most_drawn(100) == CHUNK, "drafts are so much shorter"
    assert drafted.most_drawn(300) == plain.most_drawn(300) == 300
    for costs in plain, drafted:
        without = replace(costs, vocab=0)
        logits = costs.logit_bytes(costs.most_drawn(5))
        assert costs.working_bytes([[100] * 3, [50] * 2]) == without.working_bytes([[100] * 3, [50] * 2]) + logits
        assert costs.working_bytes([[100]], drawn=3) == without.working_bytes([[100]]) + costs.logit_bytes(3)


def test_what_sampling_holds_does_not_grow_with_rows_beyond_those_that_are_drawn_at_once() -> None:
    costs = replace(PLAIN, vocab=DRAWN_AT_ONCE // 8)
    assert costs.logit_bytes(8) == 8 * costs.logit_bytes(1)
    assert costs.logit_bytes(9) - costs.logit_bytes(8) < costs.logit_bytes(1) / 2
    larger = replace(PLAIN, vocab=2 * DRAWN_AT_ONCE)
    assert larger.logit_bytes(1) > 50 * larger.vocab


def test_without_rows_only_the_weights_count() -> None:
    assert HYBRID.peak_bytes([]) == HYBRID.peak_bytes([[]]) == 1_300_000


@given(costs, groups, st.integers(0, 3), st.integers(1, 20_000))
def test_another_row_never_takes_less_memory(
    costs: MemoryModel, groups: list[list[int]], place: int, tokens: int
) -> None:
    more = [[*group, tokens] if i == place else group for i, group in enumerate([*groups, []])]
    assert costs.peak_bytes(more) >= costs.peak_bytes(groups)


@given(costs, groups.filter(any), st.integers(1, 5000))
def test_longer_rows_never_take_less_memory(costs: MemoryModel, groups: list[list[int]], more: int) -> None:
    longer = [[tokens + more for tokens in group] for group in groups]
    assert costs.peak_bytes(longer) >= costs.peak_bytes(groups)


@given(costs, st.integers(0, 10**10))
def test_the_longest_row_fits_and_a_longer_one_does_not(costs: MemoryModel, limit: int) -> None:
    longest = costs.max_tokens(limit)
    assert not longest or costs.peak_bytes([[longest]]) <= limit
    assert longest >= 1 << 31 or costs.peak_bytes([[longest + 1]]) > limit


def test_model_without_kv_cache_has_no_longest_row() -> None:
    assert replace(PLAIN, kv_layers=(), state_bytes=100).max_tokens(2_000_000) > 10**9


@given(costs, st.integers(1, 5000), st.integers(0, 10**9))
def test_max_rows_fit_and_one_more_does_not(costs: MemoryModel, tokens: int, limit: int) -> None:
    rows = costs.max_rows(tokens, limit)
    assert not rows or costs.peak_bytes([[tokens] * rows]) <= limit
    assert rows == MAX_ROWS or costs.peak_bytes([[tokens] * (rows + 1)]) > limit


def test_longest_chunk_fits_and_a_longer_one_does_not() -> None:
    limit = HYBRID.peak_bytes([[5000]], chunk=1000)
    assert HYBRID.longest_chunk([[5000]], limit) == 1000


def test_a_forward_of_several_prompts_takes_their_tokens_and_copies() -> None:
    stateless = replace(HYBRID, state_bytes=0)
    assert stateless.packed_tokens(8, 16, 0) == 8 * 16, "new rows are not copied"
    assert stateless.packed_tokens(8, 16, 84) == 8 * (16 + 10 * (84 + 16) // 50)
    assert HYBRID.packed_tokens(8, 16, 84) == 8 * (16 + (10 * (84 + 16) + 7_000) // 50)
    windows = replace(stateless, kv_layers=HYBRID.kv_layers[1:])
    assert windows.packed_tokens(1, 38, 10_000) == windows.packed_tokens(1, 38, 600) == 38 + 10 * (512 + 38) // 50


def test_chunk_that_admission_reserved_is_always_allowed() -> None:
    assert HYBRID.longest_chunk([[5000]], limit=0) == CHUNK


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (20_992, "21 kB"), (3_140_000_000, "3.1 GB"), (80_000_000, "80 MB")],
)
def test_sizes_are_printed_in_readable_units(count: int, said: str) -> None:
    assert format_bytes(count) == said


def test_correction_does_not_scale_the_weights() -> None:
    corrected = replace(PLAIN, factor=2.0)
    assert corrected.peak_bytes([[1000]]) - 1_000_000 == 2 * (PLAIN.peak_bytes([[1000]]) - 1_000_000)


sizes = st.tuples(st.integers(1, 5000), st.integers(1, 10**10))


@given(sizes, sizes, st.integers(1, 10**4))
def test_image_of_a_measured_size_is_not_predicted_lower(
    one: tuple[int, int], other: tuple[int, int], feature_bytes: int
) -> None:
    few, many = sorted([one, other])
    tower = EncoderCost.of(few, many if many[0] > few[0] else few, feature_bytes)
    for tokens, needed in (few, many) if many[0] > few[0] else (few,):
        assert tower.bytes_for(ImageDemand(tokens)) >= needed


@given(st.integers(0, 10**6), st.integers(0, 1000), st.integers(1, 500), st.integers(501, 5000))
def test_linear_and_quadratic_bytes_are_derived_from_two_images(
    token_bytes: int, pair_bytes: int, few: int, many: int
) -> None:
    tower = EncoderCost(token_bytes, pair_bytes, 8)
    first, second = ((tokens, tower.bytes_for(ImageDemand(tokens))) for tokens in (few, many))
    assert EncoderCost.of(first, second, 8) == tower


def test_with_images_of_one_size_each_token_takes_its_share() -> None:
    assert EncoderCost.of((256, 1_000_000), (256, 1_000_000), 8) == EncoderCost(3907, 0, 8)


def test_one_image_is_encoded_at_a_time_and_features_of_all_are_held() -> None:
    seeing = replace(PLAIN, encoder=EncoderCost(token_bytes=1000, pair_bytes=10, feature_bytes=4))
    several = ImageDemand(100, 100) + ImageDemand(300, 500) + NO_IMAGES
    needed = 300 * 1000 + 300**2 * 10 + 600 * 4
    assert seeing.peak_bytes([[1000]], images=several) == PLAIN.peak_bytes([[1000]]) + needed
    assert seeing.peak_bytes([], images=several) == PLAIN.peak_bytes([]) + needed


@given(st.integers(0, 2 * CHUNK), st.integers(0, 3 * CHUNK), st.integers(1, 2000))
def test_image_computed_in_one_chunk_has_a_chunk_of_its_length_reserved(longest: int, chunk: int, length: int) -> None:
    needed = HYBRID.peak_bytes([[length]], max(chunk, longest))
    whole, cut = (replace(HYBRID, encoder=EncoderCost(single_chunk=whole)) for whole in (True, False))
    assert whole.peak_bytes([[length]], chunk, ImageDemand(longest=longest)) == needed
    assert whole.working_bytes([[length]], chunk, ImageDemand(longest=longest)) == HYBRID.working_bytes(
        [[length]], chunk
    )
    assert cut.peak_bytes([[length]], chunk, ImageDemand(longest=longest)) == HYBRID.peak_bytes([[length]], chunk)


def test_pixel_inputs_are_not_scaled_by_the_correction() -> None:
    costs, images = replace(PLAIN, factor=2.0), ImageDemand(prepared_bytes=700)
    assert costs.peak_bytes([[1000]], images=images) == costs.peak_bytes([[1000]]) + 700
    assert costs.working_bytes([[1000]], images=images) == costs.working_bytes([[1000]])
    assert (images + images).at(50) == images


def test_drafts_need_room_after_the_longest_row_a_wider_ring_and_second_states() -> None:
    layers = (KVLayers(10, 10), KVLayers(4, 4, window=64))
    plain = MemoryModel(0, kv_layers=layers, state_bytes=1000)
    drafted = replace(plain, max_draft=7)
    stepped = replace(plain, max_draft=7, draft_states=10, state_layer_bytes=300)
    assert stepped.group_bytes(2, 100)[0] - drafted.group_bytes(2, 100)[0] == 2 * (8 * 1000 + 8 * 300)
    (without, _), (within, _) = plain.group_bytes(2, 100), drafted.group_bytes(2, 100)
    assert within - without == 2 * 1000 + 2 * 4 * 7
    assert drafted.group_bytes(1, 250)[0] - plain.group_bytes(1, 250)[0] == 1000 + 10 * BUFFER_TOKENS + 4 * 7
    assert drafted.row_bytes(100) == plain.row_bytes(100)


@pytest.mark.parametrize("max_draft", [0, 7])
def test_slack_is_what_buffers_hold_beyond_their_rows_whatever_is_reserved_for_drafts(max_draft: int) -> None:
    costs = MemoryModel(0, kv_layers=(KVLayers(10, 10),), state_bytes=1000, state_layer_bytes=300)
    costs = replace(costs, max_draft=max_draft, draft_states=10)

    def buffers(rows: int) -> int:
        """Return the bytes of the buffers of rows of 400 tokens, between two forwards."""
        padded, tokens = padded_shape(rows, 400 + max_draft, 400 + max_draft)
        return rows * 1000 + padded * tokens * 10

    held = [buffers(8), buffers(2), buffers(1)]
    assert costs.slack_bytes([[400], [400, 400], [400]], held) == buffers(8) - buffers(1)
