"""The proposers of a worker, with the widths that they choose by what forwards have cost."""

import pytest

from tests.engine.driver import Run
from tests.engine.machine import grammars
from tests.engine.machine.families import Family
from tests.engine.tiny import model, prompt
from worker.engine.speculators import speculator_of


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "rwkv7", "deepseek_v3"])
def test_copies_and_grammars_change_no_token(family: str) -> None:
    plain, drafted = Run(model(family)), Run(model(family), speculator=speculator_of(model(family)))
    for run in plain, drafted:
        for index in range(4):
            grammar = grammars.make(Family("qwen3"), grammars.Json()) if index % 2 else None
            run.add(str(index), prompt(6, index) * 6, max_tokens=60, grammar=grammar)
        run.drain()
    assert drafted.generated == plain.generated
    assert drafted.ended == plain.ended
