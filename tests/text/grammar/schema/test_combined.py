"""Keywords that meet in one schema: whatever is rewritten, none of them is lost."""

import random
from collections.abc import Callable

import pytest

from tests.selection import examples
from tests.text.grammar.schema.answers import Schema
from tests.text.grammar.schema.combined import INSTANCES, compiled, of_keywords, of_names, wrong_answer


@pytest.mark.parametrize("draw", [of_keywords, of_names])
@pytest.mark.parametrize("seed", range(4))
def test_keywords_side_by_side_are_all_held(draw: Callable[[random.Random], Schema], seed: int) -> None:
    dice = random.Random(seed)
    held = 0
    for _ in range(examples(600)):
        schema = draw(dice)
        if (found := compiled(schema)) is not None:
            held += 1
            wrong = wrong_answer(schema, found, dice.sample(INSTANCES, 60), dice)
            assert wrong is None, (schema, wrong)
    assert held > examples(600) / 3
