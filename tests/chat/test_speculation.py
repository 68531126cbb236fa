"""What a request allows of speculation, and the receipt that its result gets."""

from typing import Any

import pytest

from schemas import ChatRequest
from schemas.result import SpeculationReport
from worker.chat.speculation import Counts, SpeculationReceipt, draft_limit
from worker.schedule.outcomes import Speculated
from worker.schedule.report import DraftUse
from worker.settings import Settings

VERIFIED = (Speculated("a", "copy", 7, 7), Speculated("a", "prediction", 4, 1), Speculated("a", "copy", 3, 0))


@pytest.mark.parametrize(
    ("speculation", "limit"), [(None, None), (True, None), (False, 0), ({"max_tokens": 3}, 3), ({"max_tokens": 0}, 0)]
)
def test_a_request_limits_its_drafts(speculation: Any, limit: int | None) -> None:
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "speculation": speculation})
    assert draft_limit(request, Settings(model="m", speculation="auto")) == limit
    assert draft_limit(request, Settings(model="m", speculation="off")) == 0


def test_a_receipt_counts_drafts_by_their_kind() -> None:
    receipt = SpeculationReceipt()
    for verified in VERIFIED:
        receipt.record(verified)
    report = receipt.as_result(tokens=12)
    assert report == {
        "proposed": 14,
        "accepted": 8,
        "tokens_per_forward": 3.0,
        "kinds": {"copy": {"proposed": 10, "accepted": 7}, "prediction": {"proposed": 4, "accepted": 1}},
    }
    assert receipt.predicted == Counts(4, 1)
    SpeculationReport.model_validate(report)


def test_a_receipt_without_drafts_is_given_if_the_request_asks() -> None:
    assert SpeculationReceipt().as_result(tokens=5) is None
    report = SpeculationReceipt(requested=True).as_result(tokens=5)
    assert report == {"proposed": 0, "accepted": 0, "tokens_per_forward": 1.0, "kinds": {}}


def test_a_step_counts_its_drafts_by_position() -> None:
    assert DraftUse.of(VERIFIED) == DraftUse(3, 14, (2, 1, 1, 1, 1, 1, 1))
    assert DraftUse.of(VERIFIED).accepted == 8
    assert DraftUse.of(()) == DraftUse()


def test_a_receipt_counts_the_tokens_of_a_draft_by_their_own_kinds() -> None:
    receipt = SpeculationReceipt()
    kinds = ("grammar", "grammar", "grammar_guess", "grammar")
    receipt.record(Speculated("a", "grammar", 4, 2, kinds))
    assert (receipt.of("grammar"), receipt.of("grammar_guess")) == (Counts(3, 2), Counts(1, 0))
