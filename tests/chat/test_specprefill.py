"""The decision for SpecPrefill, and its report."""

import json
from typing import Any

import pytest

from schemas import ChatRequest
from worker.chat.specprefill import SpecPrefillReport, dump_report, load_report, specprefill_params
from worker.schedule.outcomes import SpecPrefillApplied, SpecPrefillSkipped
from worker.schedule.request import SpecPrefillParams
from worker.settings import Settings
from worker.text.prompt.prompt import Prompt

USER = {"role": "user", "content": "What is said here?"}
TOOL = {"type": "function", "function": {"name": "look"}}
THINNABLE = ((100, 8_000),)


def asked(
    tokens: int = 9_000,
    *,
    thinnable: tuple[tuple[int, int], ...] = THINNABLE,
    draft: str | None = "drafts/small",
    settings: dict[str, Any] | None = None,
    **request: Any,
) -> tuple[SpecPrefillParams | None, SpecPrefillReport]:
    given = Settings(model="m", specprefill_draft_model=draft, **(settings or {}))
    body = ChatRequest.model_validate({"messages": [USER], **request})
    return specprefill_params(body, Prompt((1,) * tokens, "none", droppable_ranges=thinnable), given)


def test_a_long_prompt_is_thinned_by_the_workers_rule() -> None:
    thinning, receipt = asked()
    assert thinning == SpecPrefillParams(0.3, THINNABLE, min_tokens=8192, requested=False)
    assert (receipt.draft, receipt.as_result(9_000, 1.0)) == ("small", None)


@pytest.mark.parametrize("request_", [{}, {"specprefill": None}])
def test_a_shorter_one_is_not_and_nothing_is_said_of_it(request_: dict[str, Any]) -> None:
    thinning, receipt = asked(8_191, **request_)
    assert (thinning, receipt.as_result(8_191, 1.0)) == (None, None)


def test_a_request_may_ask_for_it_and_for_how_much() -> None:
    thinning, _ = asked(500, specprefill=True, specprefill_keep_pct=0.5)
    assert thinning == SpecPrefillParams(0.5, THINNABLE, min_tokens=1, requested=True)


def test_a_request_may_forbid_it_and_a_worker_without_a_draft_has_no_rule() -> None:
    assert asked(specprefill=False) == (None, SpecPrefillReport())
    assert asked(draft=None) == (None, SpecPrefillReport())


@pytest.mark.parametrize(
    ("why", "request_"),
    [
        ("The request offers tools", {"tools": [TOOL]}),
        ("The request asks for JSON", {"response_format": {"type": "json_object"}}),
        (
            "The prompt is mostly code",
            {"messages": [{"role": "user", "content": "Fix:\n```\n" + "x = 1\n" * 9 + "```"}]},
        ),
    ],
)
def test_what_needs_every_token_is_computed_whole_unless_it_is_asked_for(why: str, request_: dict[str, Any]) -> None:
    thinning, receipt = asked(**request_)
    assert thinning is None
    assert receipt.why_whole.startswith(why)
    assert receipt.as_result(9_000, 1.0) == {"skipped": receipt.why_whole}
    assert asked(**request_, specprefill=True)[0] is not None


def test_half_in_fences_is_not_mostly_code() -> None:
    assert asked(messages=[{"role": "user", "content": "What does this do? ```x = 1```"}])[0] is not None


def test_what_is_too_long_or_has_nothing_to_leave_out_is_computed_whole_even_if_it_is_asked_for() -> None:
    _, receipt = asked(9_000, settings={"specprefill_max_tokens": 8_999}, specprefill=True)
    assert receipt.why_whole == "The prompt has 9,000 tokens, and prompts are scored up to 8,999."
    _, receipt = asked(thinnable=(), specprefill=True)
    assert receipt.why_whole == "The prompt has no long text from which tokens could be dropped."


def test_a_receipt_tells_what_was_kept() -> None:
    receipt = SpecPrefillReport("small")
    receipt.record(SpecPrefillApplied("x", ((0, 100), (900, 1000)), seconds=0.5))
    assert receipt.kept_tokens == 200
    assert receipt.as_result(1000, 2.0) == {"kept": 0.2, "draft": "small", "scoring_s": 0.5, "prefill_s": 1.5}
    receipt.record(SpecPrefillSkipped("x", "It failed."))
    assert (receipt.kept_tokens, receipt.as_result(1000, 2.0)) == (None, {"skipped": "It failed."})


def test_another_attempt_recalls_what_was_decided_with_the_same_model() -> None:
    receipt = SpecPrefillReport("small", "", ((0, 3), (7, 9)), 0.25)
    assert load_report(dump_report(receipt, "fp").encode(), "fp", 9) == receipt
    assert load_report(dump_report(receipt, "fp").encode(), "other", 9) is None
    whole = SpecPrefillReport("small", "It failed.")
    assert load_report(dump_report(whole, "fp").encode(), "fp", 9) == whole


NOT_OURS = [
    b"", b"{", b"[]", b"7", b"\xff", b'{"fingerprint":"fp"}', b'{"fingerprint":"fp","kept":[1]}',
    b'{"fingerprint":"fp","kept":null,"more":1}', b'{"fingerprint":"fp","kept":[[0,5]]}', b"[" * 100_000,
    b'{"fingerprint":"fp","kept":[[5,3],[4,9]]}', b'{"fingerprint":"fp","kept":[[0,1e400]]}',
    b'{"fingerprint":"fp","kept":[]}', b'{"fingerprint":"fp","kept":[[0,9]],"scoring_s":"x"}',
    b'{"fingerprint":"fp","kept":[[0,9]],"scoring_s":NaN}', b'{"fingerprint":"fp","kept":null,"draft":5}',
    b'{"fingerprint":"fp","kept":null,"why_whole":[]}',
]  # fmt: skip


@pytest.mark.parametrize("told", NOT_OURS)
def test_what_is_not_ours_is_as_good_as_nothing(told: bytes) -> None:
    assert load_report(told, "fp", 9) is None


def test_it_is_stored_as_json() -> None:
    assert json.loads(dump_report(SpecPrefillReport("small", "", ((0, 3),), 0.25), "fp")) == {
        "fingerprint": "fp", "draft": "small", "why_whole": "", "kept": [[0, 3]], "scoring_s": 0.25,
    }  # fmt: skip
