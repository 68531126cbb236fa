"""A row's prompt and answer are one sequence."""

import pytest

from worker.engine.speculation.offer import RowTokens

TEXTS = [((1, 2, 3), (4, 5)), ((1, 2, 3), ()), ((), (4, 5)), ((1,), ()), ((), ())]


@pytest.mark.parametrize(("prompt", "answer"), TEXTS)
def test_each_index_is_that_of_prompt_and_answer_together(prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
    both, tokens = (*prompt, *answer), RowTokens(prompt, answer)
    assert (len(tokens), *tokens) == (len(both), *both)
    for at in range(-len(both), len(both)):
        assert tokens[at] == both[at]
    for at in (len(both), -len(both) - 1):
        with pytest.raises(IndexError):
            tokens[at]


@pytest.mark.parametrize(("prompt", "answer"), TEXTS)
def test_each_slice_is_that_of_prompt_and_answer_together(prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
    both, tokens = (*prompt, *answer), RowTokens(prompt, answer)
    edges = [None, *range(-6, 7)]
    for own in (slice(start, stop, step) for start in edges for stop in edges for step in (None, 2, -1)):
        assert tokens[own] == both[own]
