import pytest

from worker.engine.speculation.offer import Offer
from worker.engine.speculation.width import DraftedCosts, DraftingCosts, ForwardCosts, choose_width

SURE = Offer("mtp", (0,) * 3, (0.99,) * 3)


def forwards() -> ForwardCosts:
    """Forwards of one row that cost the same up to four tokens."""
    learned = ForwardCosts()
    for width in range(1, 5):
        for _ in range(5):
            learned.observe(1, width, 2.0)
    return learned


def drafted(*plain_steps: float, depth: int = 3) -> DraftedCosts:
    drafting = DraftingCosts()
    for each in plain_steps:
        drafting.observe(1, depth, each)
    return DraftedCosts(forwards(), drafting)


def test_a_draft_counts_in_addition_to_its_forward() -> None:
    costs = drafted(0.5, 0.5)
    assert costs.seconds(1, 4) == pytest.approx(3.0)
    assert costs.seconds(1, 1) == pytest.approx(2.0)
    assert costs.hopeful_seconds(1, 4) == pytest.approx(3.0)


def test_drafts_that_take_longer_than_they_save_are_not_made() -> None:
    assert choose_width([SURE], drafted(2.0, 2.0), 8) == 4
    assert choose_width([SURE], drafted(3.5, 3.5), 8) == 1


def test_a_draft_is_only_as_deep_as_pays() -> None:
    costs = drafted(0.1, 0.1, depth=1)
    for _ in range(2):
        costs.drafting.observe(1, 2, 3.0)
        costs.drafting.observe(1, 3, 3.0)
    assert choose_width([SURE], costs, 8) == 2


def test_the_time_of_a_draft_is_believed_from_the_second_on() -> None:
    drafting = DraftingCosts()
    before = drafting.plain_steps(1, 3)
    drafting.observe(1, 3, 50.0)  # compiles kernels
    assert drafting.plain_steps(1, 3) == before < 1.0
    drafting.observe(1, 3, 0.5)
    assert drafting.plain_steps(1, 3) == 0.5


def test_single_slow_drafts_do_not_count() -> None:
    drafting = DraftingCosts()
    for each in (0.5, 0.6, 9.0, 0.4, 0.5):
        drafting.observe(2, 3, each)
    assert drafting.plain_steps(2, 3) == 0.5


def test_an_unknown_depth_is_estimated_by_the_nearest_of_the_nearest_rows() -> None:
    drafting = DraftingCosts()
    for rows, depth, steps in [(2, 3, 0.6), (8, 1, 0.5)] * 2:
        drafting.observe(rows, depth, steps)
    assert drafting.plain_steps(3, 1) == pytest.approx(0.2)
    assert drafting.plain_steps(16, 3) == pytest.approx(1.5)
