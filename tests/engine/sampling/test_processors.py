"""Bias and penalties of a batch: those of mlx-lm for each row, to the bit."""

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.machine.reference import processed
from tests.selection import examples
from worker.engine.batch.row import Row
from worker.engine.sampling.processors import processors_for
from worker.request import GenerationRequest, Sampling

VOCAB, STEPS = 12, 3
FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
TOKEN = st.integers(0, VOCAB - 1)  # few, so that tokens return
# Sums are exact, so that a penalty that is subtracted n times equals n times the penalty.
QUARTERS = st.integers(-8, 8).map(lambda n: n / 4)
SAMPLING = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.0, 2.0, 0.5]),
    presence_penalty=st.just(0.0) | QUARTERS,
    frequency_penalty=st.just(0.0) | QUARTERS,
    logit_bias=st.just(()) | st.dictionaries(TOKEN, QUARTERS, max_size=3).map(lambda pairs: tuple(pairs.items())),
)
PROMPT = st.lists(TOKEN, min_size=1, max_size=6).map(tuple)
ROW = st.tuples(SAMPLING, PROMPT, st.lists(TOKEN, max_size=6), st.booleans())


def row(sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> Row:
    return Row.of(GenerationRequest("a", tuple(prompt), 99, sampling, resume_tokens=tuple(answer)))


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.lists(ROW, min_size=1, max_size=6), st.sampled_from([*FLOATS]))
def test_logits_of_each_row_are_those_of_mlx_lm_s_processors(
    data: st.DataObject, hows: list[tuple[Sampling, tuple[int, ...], list[int], bool]], dtype: str
) -> None:
    """Rows begin with a token that they have drawn, or with their last known one."""
    rows = [row(sampling, prompt, answer) for sampling, prompt, answer, _ in hows]
    known = [[*prompt, *answer] for _, prompt, answer, _ in hows]
    drawn = [each[3] for each in hows]
    processors = processors_for(rows, drawn)
    for step in range(STEPS):
        fed = [data.draw(TOKEN) if drawn[i] or step else known[i][-1] for i in range(len(rows))]
        known = [[*known[i], fed[i]] if drawn[i] or step else known[i] for i in range(len(rows))]
        logits = (mx.random.randint(-8, 8, (len(rows), VOCAB), key=mx.random.key(step)) / 4).astype(FLOATS[dtype])
        expected = [
            processed(hows[i][0], mx.array(known[i]), len(hows[i][1]), logits[i : i + 1] + 0) for i in range(len(rows))
        ]
        made = logits + 0
        for process in processors:
            made = process(made, mx.array(fed, dtype=mx.uint32))
        assert made.dtype == logits.dtype
        assert made.tolist() == mx.concatenate(expected).tolist()


@settings(max_examples=examples(60), deadline=None)
@given(st.data(), st.lists(ROW, min_size=1, max_size=6), st.sampled_from([*FLOATS]))
def test_rows_of_a_batch_get_the_bits_that_each_gets_alone(
    data: st.DataObject, hows: list[tuple[Sampling, tuple[int, ...], list[int], bool]], dtype: str
) -> None:
    """With penalties and logits that no float represents exactly."""
    made_rough = [(rough(sampling), prompt, answer, drawn) for sampling, prompt, answer, drawn in hows]
    rows, drawn = [row(*each[:3]) for each in made_rough], [each[3] for each in made_rough]
    together, alone = processors_for(rows, drawn), [processors_for([each], [drawn[i]]) for i, each in enumerate(rows)]
    for step in range(STEPS):
        fed = mx.array(data.draw(st.lists(TOKEN, min_size=len(rows), max_size=len(rows))))
        logits = (5 * mx.random.normal((len(rows), VOCAB), key=mx.random.key(step))).astype(FLOATS[dtype])
        parts = [logits[i : i + 1] + 0 for i in range(len(rows))]
        for i, processors in enumerate(alone):
            for process in processors:
                parts[i] = process(parts[i], fed[i : i + 1])
        made = logits + 0
        for process in together:
            made = process(made, fed)
        assert made.tolist() == mx.concatenate(parts).tolist()


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_repetition_penalty_is_mlx_lm_s_to_the_bit(dtype: mx.Dtype) -> None:
    sampling = Sampling(repetition_penalty=1.3)
    logits = mx.random.normal((1, VOCAB), key=mx.random.key(0)).astype(dtype)
    expected = processed(sampling, mx.array([1, 2, 2, 5, 7]), 2, logits + 0)
    (process,) = processors_for([row(sampling, (1, 2), [2, 5])], [True])
    assert process(logits, mx.array([7])).tolist() == expected.tolist()


def rough(sampling: Sampling) -> Sampling:
    return Sampling(
        repetition_penalty=sampling.repetition_penalty * 0.77,
        presence_penalty=sampling.presence_penalty / 3,
        frequency_penalty=sampling.frequency_penalty / 7,
        logit_bias=tuple((token, value / 3) for token, value in sampling.logit_bias),
    )


def test_small_frequency_penalty_adds_up_in_half_precision() -> None:
    """Subtracted one by one, as mlx-lm does, each would be lost: bfloat16 has steps of 0.125 at 20."""
    process = processors_for([row(Sampling(frequency_penalty=0.05), (1,), [3] * 9)], [True])[0]
    logits = process(mx.full((1, VOCAB), 20.0, mx.bfloat16), mx.array([3]))
    assert logits[0, 3].item() == 19.5


def test_rows_without_bias_penalty_or_grammar_have_no_processor() -> None:
    assert processors_for([row(Sampling(temperature=1.0, top_p=0.5, seed=3), (1,), [3])], [True]) == []


@pytest.mark.parametrize(
    "sampling",
    [Sampling(repetition_penalty=2.0), Sampling(presence_penalty=1.0), Sampling(logit_bias=((3, 1.0),))],
    ids=["repetition", "presence", "bias"],
)
def test_rows_of_one_kind_share_a_processor(sampling: Sampling) -> None:
    rows = [row(sampling, (1, i), [i]) for i in range(9)]
    assert len(processors_for(rows, [True] * 9)) == 1


def test_least_repetition_penalty_keeps_logits_finite() -> None:
    process = processors_for([row(Sampling(repetition_penalty=1e-320), (1,), [])], [True])[0]
    assert mx.all(mx.isfinite(process(mx.array([[3.0, 30.0, -30.0]]), mx.array([2])))).item()
