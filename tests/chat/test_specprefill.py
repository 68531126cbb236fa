"""The decision for SpecPrefill, and its report."""

from typing import Any

import pytest

from schemas import ChatRequest
from worker.chat.specprefill import as_result, specprefill_params, with_outcome
from worker.outcomes import SpecPrefillApplied, SpecPrefillSkipped
from worker.queue.job.resume_state import SpecPrefillReport
from worker.request import SpecPrefillParams
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
    assert (receipt.draft, as_result(receipt, 9_000, 1.0)) == ("small", None)


@pytest.mark.parametrize("request_", [{}, {"specprefill": None}])
def test_a_shorter_one_is_not_and_nothing_is_said_of_it(request_: dict[str, Any]) -> None:
    thinning, receipt = asked(8_191, **request_)
    assert (thinning, as_result(receipt, 8_191, 1.0)) == (None, None)


def test_a_request_may_ask_for_it_and_for_how_much() -> None:
    thinning, _ = asked(500, specprefill=True, specprefill_keep_pct=0.5)
    assert thinning == SpecPrefillParams(0.5, THINNABLE, min_tokens=1, requested=True)


def test_a_request_may_forbid_it_and_a_worker_without_a_draft_has_no_rule() -> None:
    assert asked(specprefill=False) == (None, SpecPrefillReport(kept=None))
    assert asked(draft=None) == (None, SpecPrefillReport(kept=None))


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
    assert as_result(receipt, 9_000, 1.0) == {"skipped": receipt.why_whole}
    assert asked(**request_, specprefill=True)[0] is not None


def test_half_in_fences_is_not_mostly_code() -> None:
    assert asked(messages=[{"role": "user", "content": "What does this do? ```x = 1```"}])[0] is not None


def test_what_is_too_long_or_has_nothing_to_leave_out_is_computed_whole_even_if_it_is_asked_for() -> None:
    _, receipt = asked(9_000, settings={"specprefill_max_tokens": 8_999}, specprefill=True)
    assert receipt.why_whole == "The prompt has 9,000 tokens, and prompts are scored up to 8,999."
    _, receipt = asked(thinnable=(), specprefill=True)
    assert receipt.why_whole == "The prompt has no long text from which tokens could be dropped."


def test_a_report_has_the_engine_s_decision() -> None:
    given = SpecPrefillReport(kept=None, draft="small")
    applied = with_outcome(given, SpecPrefillApplied("x", ((0, 100), (900, 1000)), seconds=0.5), "fp")
    assert (applied.kept_tokens, applied.fingerprint) == (200, "fp")
    assert as_result(applied, 1000, 2.0) == {"kept": 0.2, "draft": "small", "scoring_s": 0.5, "prefill_s": 1.5}
    skipped = with_outcome(applied, SpecPrefillSkipped("x", "It failed."), "fp")
    assert (skipped.kept_tokens, as_result(skipped, 1000, 2.0)) == (None, {"skipped": "It failed."})
