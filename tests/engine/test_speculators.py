"""The proposers of a worker, with the widths that they choose by what forwards have cost."""

import pytest

from tests.engine.driver import Run
from tests.engine.machine import grammars
from tests.engine.machine.families import Family
from tests.engine.speculation.oracle import verify_everything
from tests.engine.tiny import EVERY_FAMILY, alone, model, model_of, network, prompt
from worker.engine.cache.recurrent import SlotArraysCache
from worker.engine.model.load import Model
from worker.engine.thread import speculator_of
from worker.outcomes import DraftUse


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


def assert_decodes_plainly(served: Model) -> None:
    run = Run(served, speculator=speculator_of(served))
    for index in range(3):
        run.add(str(index), prompt(6, index) * 6, max_tokens=20)
    while len(run.engine):
        assert run.step().drafts == DraftUse()
    assert run.generated == {str(index): alone(served.network, prompt(6, index) * 6, 20) for index in range(3)}


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "kimi_linear"])
def test_a_family_that_would_pay_too_much_decodes_plainly(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_everything(monkeypatch)
    assert model(family).drafting.unsupported_reason is not None
    assert_decodes_plainly(model(family))


@pytest.mark.parametrize("family", ["rwkv7", "qwen3_5"])
def test_a_family_whose_states_cannot_be_advanced_decodes_plainly(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not recorded")

    verify_everything(monkeypatch)
    monkeypatch.setattr(SlotArraysCache, "commit", refuse)
    served = model_of(network(family), EVERY_FAMILY[family])
    assert served.drafting.unsupported_reason == "its recurrent states cannot advance by a part of a forward's tokens"
    assert_decodes_plainly(served)
