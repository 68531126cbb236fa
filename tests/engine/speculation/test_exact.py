"""Rows with drafts draw what they draw without: greedy and sampled, with penalties, grammars and logprobs, as others
join and leave, are preempted and lose their caches, and after a crash."""

from collections.abc import Iterator

import pytest

from tests.engine.driver import Run
from tests.engine.speculation.oracle import Oracle, speculator_of, verify_everything
from tests.engine.speculation.scenarios import (
    ANSWER,
    LENGTHS,
    assert_equal,
    drafted,
    eventful,
    every_family,
    guided,
    joined,
    pair,
    pair_of,
    plain_of,
    resumed,
    submit,
)
from tests.engine.tiny import EVERY_FAMILY, ONLY_MLX_VLM, alone, model, network, prompt
from tests.support.stack import ROOT
from worker.request import GenerationRequest


@pytest.fixture(autouse=True)
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_everything(monkeypatch)


def test_drafts_are_tested_with_as_many_families_as_the_page_on_models_says() -> None:
    assert len(EVERY_FAMILY) >= 20
    assert f", {len(EVERY_FAMILY)} in all." in (ROOT / "docs" / "models.md").read_text()


@pytest.mark.parametrize("family", [*EVERY_FAMILY, *ONLY_MLX_VLM])
def test_rows_with_drafts_draw_the_same(family: str) -> None:
    without, run, oracle = pair_of(family, joined)
    assert_equal(without, run, oracle)
    assert oracle.accepted < oracle.proposed
    for index in 0, 5:  # the greedy rows without penalties
        assert run.generated[str(index)] == alone(network(family), prompt(5, index), ANSWER - index)


@pytest.mark.parametrize("family", every_family("qwen3", "qwen3_5"))
def test_rows_with_a_grammar_draw_the_same(family: str) -> None:
    assert_equal(*pair_of(family, guided))


@pytest.mark.parametrize("family", every_family("gemma3", "qwen3_5", "rwkv7"))
def test_rows_that_are_preempted_lost_or_cancelled_draw_the_same(family: str) -> None:
    without, run, oracle = pair(model(family), eventful)
    # Rows without a cache are recomputed without drafts, so their logprobs come from other forwards.
    assert (run.generated, run.ended) == (without.generated, without.ended)
    assert 0 < oracle.accepted < oracle.proposed
    assert oracle.held == set()


@pytest.mark.parametrize("is_guided", [False, True], ids=["free", "guided"])
@pytest.mark.parametrize("family", every_family("qwen3", "qwen3_5"))
def test_rows_that_resume_draw_the_same(family: str, is_guided: bool) -> None:
    whole = plain_of(family, guided if is_guided else joined).generated
    run, oracle = drafted(model(family), whole, resumed(whole, guided=is_guided))
    assert run.generated == {str(index): whole[str(index)] for index in range(6)}
    assert oracle.accepted > 0


def next_turns(run: Run) -> Iterator[str]:
    """Continue each conversation from what the prefix cache holds of it."""
    for index in range(7):
        said = (*prompt(LENGTHS[index % 5], index), *run.generated[str(index)])
        run.add(f"next {index}", (*said, *prompt(4, 40 + index)), max_tokens=8)
        yield f"next {index}"
    run.drain()


@pytest.mark.parametrize("family", every_family("gemma3", "qwen3_5", "falcon_h1"))
def test_a_next_turn_uses_the_cache_that_a_row_with_drafts_has_left(family: str) -> None:
    without, run, _ = pair(model(family), joined)
    for each in without, run:
        ids = [*next_turns(each)]
        assert all(each.cached[id] > 0 for id in ids)
    assert run.generated == without.generated


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5"])
def test_memory_of_verified_drafts_is_predicted(family: str) -> None:
    without = plain_of(family, joined)
    run = Run(model(family), speculator=speculator_of(model(family), Oracle(without.generated)))
    for index in range(5):
        submit(run, index)
    while len(run.engine):
        report = run.step()
        if report.memory:
            predicted, measured = report.memory
            assert measured <= 1.05 * predicted


def test_a_request_limits_its_drafts() -> None:
    without = Run(model("qwen3"))
    requests = [GenerationRequest(str(n), prompt(9, n), ANSWER, max_draft=n) for n in range(3)]
    for request in requests:
        without.submit(request)
    without.drain()
    oracle = Oracle(without.generated)
    run = Run(model("qwen3"), speculator=speculator_of(model("qwen3"), oracle))
    for request in requests:
        run.submit(request)
    accepted = list[int]()
    while len(run.engine):
        accepted.append(len(run.step().drafts.accepted_at))
    assert run.generated == without.generated
    assert max(accepted) == 2
