"""Rows with copied, predicted and forced drafts draw what they draw without."""

from dataclasses import replace

import pytest

from tests.engine.driver import Run
from tests.engine.machine import grammars
from tests.engine.machine.families import Family
from tests.engine.speculation.oracle import recurrence_of, verify_everything
from tests.engine.tiny import model, prompt
from worker.engine.speculation.copies import COPY, CopyProposer
from worker.engine.speculation.forced import GRAMMAR, GrammarProposer
from worker.engine.speculation.speculator import Speculator
from worker.outcomes import MAX_DRAFT, PREDICTION, Speculated
from worker.request import GenerationRequest, Sampling

ANSWER = 24


def requests(family: str) -> list[GenerationRequest]:
    """Return free rows, one of which predicts what it answers but for a few tokens, and one with a grammar."""
    free = [
        GenerationRequest(f"free {index}", prompt(12 + index, index), ANSWER, Sampling(index / 2, seed=index))
        for index in range(3)
    ]
    grammar = grammars.make(Family(family), grammars.Json())
    return [*free, GenerationRequest("json", prompt(9, 7), ANSWER, grammar=grammar)]


def run(family: str, asked: list[GenerationRequest], speculator: Speculator | None) -> tuple[Run, list[Speculated]]:
    driven, verified = Run(model(family), speculator=speculator), list[Speculated]()
    for request in asked:
        driven.submit(request)
    while len(driven.engine):
        verified += [each for each in driven.step().outcomes if isinstance(each, Speculated)]
    return driven, verified


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_real_proposers_change_no_answer(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    verify_everything(monkeypatch)
    plain, nothing = run(family, requests(family), None)
    assert nothing == []
    predicted = {id: (*answer[:9], 11, *answer[9:]) for id, answer in plain.generated.items()}
    asked = [replace(each, prediction=predicted[each.id] if each.id != "json" else ()) for each in requests(family)]
    speculator = Speculator(
        [CopyProposer(), GrammarProposer()],
        max_draft=MAX_DRAFT,
        recurrence=recurrence_of(model(family)),
        eos_ids=model(family).tokenizer.eos_token_ids,
    )
    drafted, verified = run(family, asked, speculator)
    assert drafted.generated == plain.generated
    assert drafted.ended == plain.ended
    kinds = {each.kind for each in verified if each.accepted}
    assert {PREDICTION, GRAMMAR} <= kinds <= {PREDICTION, GRAMMAR, COPY}
