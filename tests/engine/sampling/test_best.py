"""The best tokens by chunks are those of a full sort."""

import math
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.selection import examples
from worker.engine.sampling import sampler
from worker.engine.sampling.sampler import best_ids, best_values

# Coarse, so that equal ones are common.
LOGPROB = st.integers(-12, 0).map(lambda n: n / 4) | st.just(-math.inf)


@settings(max_examples=examples(200), deadline=None)
@given(st.data(), st.integers(1, 70), st.integers(1, 3), st.sampled_from([1, 4, 16, 128]))
def test_best_tokens_are_the_first_of_a_full_sort(data: st.DataObject, vocab: int, rows: int, chunk: int) -> None:
    values = data.draw(
        st.lists(st.lists(LOGPROB, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows), label="values"
    )
    n = data.draw(st.integers(1, vocab))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_CHUNK", chunk)
        ids: Any = best_ids(mx.array(values), n).tolist()
        if n < vocab:
            unordered: Any = best_values(mx.array(values), n).tolist()
            assert [sorted(row) for row in unordered] == [sorted(row)[-n:] for row in values]
    assert ids == [sorted(range(vocab), key=row.__getitem__, reverse=True)[:n] for row in values]


def test_ids_exist_even_if_all_values_are_nan() -> None:
    ids: Any = best_ids(mx.full((1, 300), -math.nan), 2).tolist()
    assert max(ids[0]) < 300


@pytest.mark.parametrize("vocab", [131_072, 151_937])
def test_a_large_vocabulary_is_searched_by_chunks(vocab: int) -> None:
    logits = mx.random.normal((3, vocab), key=mx.random.key(0))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    expected: Any = mx.argsort(-logprobs, axis=-1)[:, :20].tolist()
    assert best_ids(logprobs, 20).tolist() == expected
    assert sampler._candidates(logprobs, 20)[0].shape == (3, 20 * 128)
