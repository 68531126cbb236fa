"""What a request allows of speculation, and the receipt that its result gets."""

from typing import Any

import pytest

from schemas import ChatRequest
from schemas.outputs import SpeculationReport
from tests.support.stack import ROOT
from worker.chat.speculation import SpeculationReceipt, draft_limit, why_no_drafts
from worker.engine.speculation.copies import COPY
from worker.engine.speculation.draft_model import DRAFT
from worker.engine.speculation.forced import GRAMMAR, GUESS
from worker.engine.speculation.mtp import MTP
from worker.outcomes import PREDICTION, DraftUse, Sampled, Speculated
from worker.settings import Settings

WHY = "No source had a draft, or none was expected to save time."
VERIFIED = (Speculated("a", "copy", 7, 7), Speculated("a", "prediction", 4, 1), Speculated("a", "copy", 3, 0))


def asked(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


@pytest.mark.parametrize(
    ("speculation", "limit"), [(None, None), (True, None), (False, 0), ({"max_tokens": 3}, 3), ({"max_tokens": 0}, 0)]
)
def test_a_request_limits_its_drafts(speculation: Any, limit: int | None) -> None:
    request = asked(speculation=speculation)
    assert draft_limit(request, Settings(model="m", speculation="auto")) == limit
    assert draft_limit(request, Settings(model="m", speculation="off")) == 0


def answered(receipt: SpeculationReceipt, *forwards: tuple[Speculated | None, int]) -> SpeculationReceipt:
    """Record forwards, each with its draft and the number of tokens that it has drawn, and return the receipt."""
    for verified, drawn in forwards:
        if verified:
            receipt.record(verified)
        for place in range(1, drawn + 1):
            receipt.count(Sampled("a", place, accepted=place < drawn))
    return receipt


def test_a_receipt_counts_drafts_by_their_kind() -> None:
    receipt = answered(SpeculationReceipt(), (None, 1), *((each, each.accepted + 1) for each in VERIFIED), (None, 1))
    report = receipt.as_result()
    assert report == {
        "proposed": 14,
        "accepted": 8,
        "tokens_per_forward": 2.6,  # 1 + 8 + 2 + 1 + 1 tokens, by five forwards
        "kinds": {"copy": {"proposed": 10, "accepted": 7}, "prediction": {"proposed": 4, "accepted": 1}},
    }
    assert receipt.predicted == (4, 1)
    SpeculationReport.model_validate(report)


def test_a_stop_sequence_within_a_draft_leaves_out_what_follows() -> None:
    receipt = answered(SpeculationReceipt(), (None, 1))
    receipt.record(Speculated("a", "copy", 7, 7))
    for place in range(3):  # the third is the last of the answer
        receipt.count(Sampled("a", place, accepted=True))
    assert receipt.as_result() == {
        "proposed": 7,
        "accepted": 3,
        "tokens_per_forward": 2.0,  # 1 + 3 tokens, by two forwards
        "kinds": {"copy": {"proposed": 7, "accepted": 3}},
    }


def test_the_next_input_of_a_row_is_not_a_token_of_the_forward_that_verifies_after_it() -> None:
    receipt = SpeculationReceipt()
    receipt.record(Speculated("a", "copy", 2, 2))
    for accepted in (False, True, True, False):  # the first was drawn by the forward before, and comes with the others
        receipt.count(Sampled("a", 5, accepted=accepted))
    report = receipt.as_result()
    assert report
    assert report["tokens_per_forward"] == 2.0


def test_the_end_of_an_answer_takes_a_forward_and_is_no_token() -> None:
    receipt = answered(SpeculationReceipt(WHY), *[(None, 1)] * 4)
    receipt.count(Sampled("a", None, "stop"))
    report = receipt.as_result()
    assert report == {"proposed": 0, "accepted": 0, "tokens_per_forward": 0.8, "kinds": {}, "skipped": WHY}
    SpeculationReport.model_validate(report)


def test_a_receipt_without_drafts_is_given_with_the_reason_if_the_request_asks() -> None:
    assert answered(SpeculationReceipt(), (None, 1)).as_result() is None
    report = answered(SpeculationReceipt(WHY), (None, 1), (None, 1)).as_result()
    assert report == {"proposed": 0, "accepted": 0, "tokens_per_forward": 1.0, "kinds": {}, "skipped": WHY}


def test_a_receipt_of_drafts_has_no_reason() -> None:
    report = answered(SpeculationReceipt(WHY), (Speculated("a", "copy", 2, 0), 1)).as_result()
    assert report
    assert "skipped" not in report


@pytest.mark.parametrize(
    ("fields", "with_auto", "with_off"),
    [
        ({}, "", ""),
        ({"speculation": True}, "No source had a draft", "Speculation is off"),
        ({"prediction": {"type": "content", "content": "x"}}, "No source had a draft", "Speculation is off"),
        ({"speculation": False}, "The request turns", "Speculation is off"),
        ({"speculation": {"max_tokens": 0}}, "The request turns", "Speculation is off"),
    ],
)
def test_the_worker_s_setting_is_the_first_reason_for_no_drafts(
    fields: dict[str, Any], with_auto: str, with_off: str
) -> None:
    request = asked(**fields)
    for setting, start in (("auto", with_auto), ("off", with_off)):
        reason = why_no_drafts(request, Settings(model="m", speculation=setting))
        assert (reason[: len(start)], bool(reason)) == (start, bool(start))


def test_a_step_counts_its_drafts_by_position() -> None:
    assert DraftUse.of(VERIFIED) == DraftUse(3, 14, (2, 1, 1, 1, 1, 1, 1))
    assert DraftUse.of(VERIFIED).accepted == 8
    assert DraftUse.of(()) == DraftUse()


def test_a_receipt_counts_the_tokens_of_a_draft_by_their_own_kinds() -> None:
    kinds = ("grammar", "grammar_guess", "grammar", "grammar")
    receipt = answered(SpeculationReceipt(), (Speculated("a", "grammar", 4, 3, kinds), 4))
    assert (receipt.of("grammar"), receipt.of("grammar_guess")) == ((3, 2), (1, 1))


@pytest.mark.parametrize("page", ["contract.md", "contract.schema.json", "models.md"])
def test_the_pages_name_every_source_of_drafts(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert [kind for kind in (COPY, PREDICTION, GRAMMAR, GUESS, MTP, DRAFT) if f"`{kind}`" not in text] == []
