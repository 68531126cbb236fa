"""A step reports the drafts that it has verified, and a request limits its own."""

from dataclasses import replace

import pytest

from tests.engine.driver import Run
from tests.engine.speculation.oracle import Oracle, speculator_of, verify_everything
from tests.engine.tiny import model, prompt
from worker.outcomes import DraftUse, Sampled, Speculated, StepReport
from worker.request import GenerationRequest

FREE = GenerationRequest("free", prompt(9, 1), 24)
LIMITED = GenerationRequest("limited", prompt(12, 2), 24, max_draft=2)
PLAIN = GenerationRequest("plain", prompt(7, 3), 24, max_draft=0)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[StepReport]:
    verify_everything(monkeypatch)
    plain = Run(model("qwen3"))
    for request in (FREE, LIMITED, PLAIN):
        plain.submit(replace(request, max_draft=0))
    plain.drain()
    drafted = Run(model("qwen3"), speculator=speculator_of(model("qwen3"), Oracle(plain.generated)))
    for request in (FREE, LIMITED, PLAIN):
        drafted.submit(request)
    made = list[StepReport]()
    while len(drafted.engine):
        made.append(drafted.step())
    assert drafted.generated == plain.generated
    return made


def verified(reports: list[StepReport]) -> list[Speculated]:
    return [outcome for report in reports for outcome in report.outcomes if isinstance(outcome, Speculated)]


def test_each_step_counts_its_own_drafts(reports: list[StepReport]) -> None:
    assert sum(report.drafts.proposed for report in reports) == sum(draft.proposed for draft in verified(reports)) > 0
    assert all(report.drafts == DraftUse.of(verified([report])) for report in reports)


def test_a_draft_is_reported_before_the_tokens_that_it_has_brought(reports: list[StepReport]) -> None:
    for report in reports:
        for draft in verified([report]):
            assert draft.kind == "oracle"
            index = report.outcomes.index(draft)
            tokens = [each for each in report.outcomes[index:] if isinstance(each, Sampled) and each.id == draft.id]
            assert len(tokens) >= draft.accepted


def test_the_accepted_tokens_of_an_answer_are_marked(reports: list[StepReport]) -> None:
    for report in reports:
        tokens = [each for each in report.outcomes if isinstance(each, Sampled)]
        accepted = {draft.id: draft.accepted for draft in verified([report])}
        assert {id: sum(each.accepted for each in tokens if each.id == id) for id in accepted} == accepted
        assert not any(each.accepted for each in tokens if each.id not in accepted)


def test_a_request_limits_its_drafts(reports: list[StepReport]) -> None:
    longest = {id: max((each.proposed for each in verified(reports) if each.id == id), default=0) for id in IDS}
    assert longest["free"] > longest["limited"] > longest["plain"] == 0
    assert longest["limited"] == 2


IDS = ("free", "limited", "plain")
