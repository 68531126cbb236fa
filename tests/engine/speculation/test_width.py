from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.speculation.offer import Offer
from worker.engine.speculation.tuning import PLAIN_EVERY, PLAIN_WANTED
from worker.engine.speculation.width import ForwardCosts, choose_width, expected_tokens, likeliest
from worker.outcomes import MAX_DRAFT

CAP = MAX_DRAFT + 1
RATES = st.lists(st.floats(0.005, 0.995), min_size=1, max_size=MAX_DRAFT)
OFFERS = st.lists(st.none() | RATES.map(lambda rates: offer(*rates)), min_size=1, max_size=16)


def offer(*rates: float) -> Offer:
    return Offer("copy", (1,) * len(rates), rates)


def costs(seconds: Callable[[int, int], float], rows: int, widths: range = range(1, CAP + 1)) -> ForwardCosts:
    learned = ForwardCosts()
    for width in widths:
        for _ in range(5):
            learned.observe(rows, width, seconds(rows, width))
    return learned


@given(OFFERS, st.integers(1, CAP))
def test_a_width_is_within_the_cap_and_the_longest_offer(offers: list[Offer | None], cap: int) -> None:
    learned = costs(lambda rows, width: 1.0, len(offers))
    longest = max((len(each.tokens) for each in offers if each), default=0)
    assert 1 <= choose_width(offers, learned, cap) <= min(cap, 1 + longest)


@given(OFFERS, st.floats(0, 1))
def test_the_best_known_width_is_chosen(offers: list[Offer | None], slope: float) -> None:
    learned = costs(lambda rows, width: 1 + slope * (width - 1), len(offers))
    chosen = choose_width(offers, learned, CAP)

    def rate(width: int) -> float:
        return sum(expected_tokens(each, width) for each in offers) / (1 + slope * (width - 1))

    widest = 1 + max((len(each.tokens) for each in offers if each), default=0)
    best = max(rate(width) for width in range(1, widest + 1))
    assert rate(chosen) >= best / 1.03 - 1e-9


def test_the_width_follows_a_staircase() -> None:
    learned = costs(lambda rows, width: 1.0 if width <= 4 else 2.5, rows=1)
    assert choose_width([offer(*[0.95] * 7)], learned, CAP) == 4
    learned = costs(lambda rows, width: 1.0 if width <= 1 else 1.5, rows=1)
    assert choose_width([offer(*[0.95] * 7)], learned, CAP) == CAP


@given(OFFERS, st.floats(0.5, 20))
def test_a_verify_forward_keeps_the_budget(offers: list[Offer | None], budget_s: float) -> None:
    learned = costs(lambda rows, width: 1.0 * width, len(offers))
    chosen = choose_width(offers, learned, CAP, budget_s)
    assert chosen == 1 or chosen <= budget_s


@given(OFFERS)
def test_nothing_is_tried_before_a_plain_step_was_measured(offers: list[Offer | None]) -> None:
    assert choose_width(offers, ForwardCosts(), CAP) == 1


def test_no_offer_means_a_plain_step() -> None:
    assert choose_width([None, None], costs(lambda rows, width: 0.01, 2), CAP) == 1


@given(RATES, st.integers(1, CAP))
def test_expected_tokens_lie_between_one_and_the_width(rates: list[float], width: int) -> None:
    assert 1 <= expected_tokens(offer(*rates), width) <= width
    assert expected_tokens(None, width) == 1


def test_the_likeliest_offer_has_the_most_expected_tokens() -> None:
    short, long = offer(0.9), offer(0.6, 0.6, 0.6)
    assert likeliest([None, short, long]) is long
    assert likeliest([None, None]) is None


def test_an_unseen_number_of_rows_is_estimated_by_its_neighbours() -> None:
    learned = costs(lambda rows, width: 1 + 0.1 * rows * (width - 1), rows=4)
    plain, wide = learned.seconds(8, 1), learned.seconds(8, 4)
    assert plain == pytest.approx(1.0)
    assert wide == pytest.approx(1 + 0.1 * 8 * 3)


def plain_costs(seconds: Callable[[int], float], *rows: int) -> ForwardCosts:
    learned = ForwardCosts()
    for number in rows:
        for _ in range(5):
            learned.observe(number, 1, seconds(number))
    return learned


@pytest.mark.parametrize("rows", [2, 5, 9, 15])
def test_plain_steps_of_other_rows_lie_between_those_of_fewer_and_of_more(rows: int) -> None:
    learned = plain_costs(lambda number: 2 + 0.2 * number, 1, 9, 16)
    assert learned.seconds(rows, 1) == pytest.approx(2 + 0.2 * rows)
    assert learned.mean_plain_s(rows) == pytest.approx(2 + 0.2 * rows)


@given(st.integers(1, 64), st.integers(1, 64))
def test_plain_steps_of_fewer_rows_take_no_longer_and_no_less_than_their_part(rows: int, more: int) -> None:
    learned = plain_costs(lambda number: 1.0, rows + more)
    assert rows / (rows + more) <= learned.mean_plain_s(rows) < 1


def plain_steps(learned: ForwardCosts, steps: int, *, rows: int = 1, timed: bool = True) -> list[int]:
    """Return the plain steps among steps that verify drafts otherwise."""
    due = list[int]()
    for step in range(steps):
        if learned.is_plain_due([rows]):
            due.append(step)
            if timed:
                learned.observe(rows, 1, 1.0)
    return due


def test_few_steps_are_plain_for_the_sake_of_their_cost() -> None:
    learned = plain_costs(lambda number: 1.0, 1)
    assert plain_steps(learned, PLAIN_EVERY + 20) == [*range(PLAIN_EVERY, PLAIN_EVERY + PLAIN_WANTED)]
    assert len(plain_steps(learned, 10_000)) <= 10_000 * PLAIN_WANTED / PLAIN_EVERY
    assert len(plain_steps(learned, 10_000, timed=False)) <= 10_000 * 2 * PLAIN_WANTED / PLAIN_EVERY


def test_no_step_is_plain_for_the_sake_of_its_cost_if_others_are_anyway() -> None:
    learned = plain_costs(lambda number: 1.0, 1)
    for _ in range(5 * PLAIN_EVERY):
        assert not learned.is_plain_due([1])
        learned.observe(1, 1, 1.0)


def test_far_fewer_rows_run_some_plain_steps_first() -> None:
    for rows, first in (12, PLAIN_EVERY), (11, PLAIN_EVERY // 3), (1, PLAIN_EVERY // 3):
        learned = plain_costs(lambda number: 1.0, 16)
        due = plain_steps(learned, PLAIN_EVERY + 20, rows=rows)
        assert due == [*range(first, first + PLAIN_WANTED)]


def test_rows_that_change_too_often_to_be_measured_verify_drafts_nevertheless() -> None:
    learned = plain_costs(lambda number: 1.0, 16)
    assert len(plain_steps(learned, 10_000, timed=False)) <= 10_000 * 6 * PLAIN_WANTED / PLAIN_EVERY


def test_an_unseen_width_lies_between_its_neighbours() -> None:
    learned = ForwardCosts()
    for width, seconds in [(1, 1.0), (2, 1.2), (6, 2.0)] * 3:
        learned.observe(2, width, seconds)
    assert learned.seconds(2, 4) == pytest.approx(1.6, rel=0.05)


def test_costs_follow_the_speed_of_the_device() -> None:
    learned = costs(lambda rows, width: 1.0 * width, rows=1)
    for _ in range(100):
        learned.observe(1, 1, 3.0)
    assert learned.seconds(1, 1) == pytest.approx(3.0, rel=0.05)
    assert learned.seconds(1, 4) == pytest.approx(12.0, rel=0.25)


def test_a_slow_first_forward_does_not_bar_a_width() -> None:
    learned = costs(lambda rows, width: 1.0, rows=1, widths=range(1, 2))
    learned.observe(1, 4, 50.0)  # compiles kernels
    assert choose_width([offer(0.99, 0.99, 0.99)], learned, 4) > 1


def test_a_width_that_was_dear_long_ago_is_tried_again() -> None:
    learned = costs(lambda rows, width: 1.0 if width < 4 else 9.0, rows=1, widths=range(1, 5))
    sure = [offer(0.99, 0.99, 0.99)]
    assert choose_width(sure, learned, 4) == 3
    for _ in range(1_100):
        learned.observe(1, 3, 1.0)
    assert choose_width(sure, learned, 4) == 4


class Simulation:
    """A group of rows, of which a forward of a given width draws tokens and costs seconds."""

    def __init__(self, rows: int, cost: Callable[[int, int], float], noise: float = 0.05) -> None:
        self.rows, self.cost, self.noise = rows, cost, noise

    def rate(self, width_of: Callable[[list[Offer | None]], int], right: float, believed: float, steps: int) -> float:
        """Return tokens per second. `right`: probability that a draft's token is right; `believed`: what is
        offered as such."""
        dice, tokens, seconds = Random(1), 0, 0.0
        learned = ForwardCosts()
        self.learned = learned
        for step in range(steps):
            offers: list[Offer | None] = [offer(*[believed] * MAX_DRAFT) for _ in range(self.rows)]
            width = width_of(offers) if step else 1
            took = self.cost(self.rows, width) * dice.uniform(1 - self.noise, 1 + self.noise)
            learned.observe(self.rows, width, took)
            tokens += sum(self.drawn(dice, right, width) for _ in range(self.rows))
            seconds += took
        return tokens / seconds

    @staticmethod
    def drawn(dice: Random, right: float, width: int) -> int:
        drawn = 1
        while drawn < width and dice.random() < right:
            drawn += 1
        return drawn

    def chosen(self, offers: list[Offer | None]) -> int:
        return choose_width(offers, self.learned, CAP)


COSTS = {
    "linear": lambda rows, width: 1 + 0.03 * rows * (width - 1),
    "staircase": lambda rows, width: 1.0 if rows * width <= 8 else 2.2 if rows * width <= 32 else 4.0,
    "steep": lambda rows, width: 1 + 0.5 * (width - 1),
}


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
def test_wrong_drafts_cost_at_most_three_percent(rows: int, cost: Callable[[int, int], float]) -> None:
    simulation = Simulation(rows, cost)
    plain = simulation.rate(lambda offers: 1, 0.02, 0.02, 600)
    assert simulation.rate(simulation.chosen, 0.02, 0.02, 600) >= 0.97 * plain


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("right", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
def test_right_drafts_gain_nearly_as_much_as_the_best_fixed_width(
    rows: int, right: float, cost: Callable[[int, int], float]
) -> None:
    simulation = Simulation(rows, cost)
    fixed = max(simulation.rate(lambda offers, w=width: w, right, right, 600) for width in range(1, CAP + 1))  # type: ignore[misc]
    assert simulation.rate(simulation.chosen, right, right, 600) >= 0.93 * fixed


def test_a_baseline_of_a_slow_time_is_corrected_by_faster_forwards() -> None:
    learned = ForwardCosts()
    for _ in range(9):
        learned.observe(1, 1, 5.0)  # something else ran on the machine
    for _ in range(20):
        learned.observe(1, 2, 1.5)
    assert learned.seconds(1, 1) == pytest.approx(1.5)
    learned.observe(1, 1, 1.0)
    learned.observe(1, 1, 1.0)
    for _ in range(70):
        learned.observe(1, 2, 1.5)
    learned.observe(1, 1, 1.0)
    assert (learned.seconds(1, 1), learned.seconds(1, 2)) == pytest.approx((1.0, 1.5))


@pytest.mark.parametrize("skew", [0.5, 3.0])
def test_uneven_times_do_not_make_plain_steps_look_dear(skew: float) -> None:
    """Slow steps are slower than fast ones are fast, so the mean of all times is above most of them."""
    dice, learned = Random(3), ForwardCosts()
    for forward in range(2_000):
        width = 1 if forward % 96 < 3 else 3
        learned.observe(1, width, (1.0 if width == 1 else 2.0) * (1 + skew * dice.random() ** 4))
    assert learned.seconds(1, 3) / learned.seconds(1, 1) == pytest.approx(2.0, rel=0.2)


def test_other_work_on_the_machine_does_not_make_the_better_width_look_worse() -> None:
    dice = Random(5)
    chosen = Counter[int]()
    for _ in range(40):
        learned = ForwardCosts()
        for width, seconds in {1: 1.0, 2: 1.9, 4: 2.0}.items():
            for _ in range(9):
                learned.observe(1, width, seconds * dice.choice((1, 1, 1, 3, 4)))
        chosen[choose_width([offer(0.9, 0.9, 0.9)], learned, 4)] += 1
    assert chosen[4] >= 36


SURE = offer(0.99, 0.99, 0.99)


def drafted(*seconds: float, depth: int = 3) -> ForwardCosts:
    """Forwards of one row that cost the same up to four tokens, and the drafts of a network."""
    learned = costs(lambda rows, width: 2.0, 1, range(1, 5))
    for each in seconds:
        learned.observe_draft("mtp", 1, depth, each)
    return learned


def test_a_draft_counts_in_addition_to_its_forward() -> None:
    learned = drafted(1.0, 1.0)
    assert learned.seconds(1, 4, "mtp") == learned.hopeful_seconds(1, 4, "mtp") == pytest.approx(3.0)
    assert learned.seconds(1, 1, "mtp") == learned.seconds(1, 4) == pytest.approx(2.0)


def test_drafts_that_take_longer_than_they_save_are_not_made() -> None:
    assert choose_width([SURE], drafted(4.0, 4.0), 8, network="mtp") == 4
    assert choose_width([SURE], drafted(7.0, 7.0), 8, network="mtp") == 1


def test_a_draft_is_only_as_deep_as_pays() -> None:
    learned = drafted(0.2, 0.2, depth=1)
    for _ in range(2):
        learned.observe_draft("mtp", 1, 2, 6.0)
        learned.observe_draft("mtp", 1, 3, 6.0)
    assert choose_width([SURE], learned, 8, network="mtp") == 2


def test_the_time_of_a_draft_is_believed_from_the_second_on() -> None:
    learned = drafted()
    before = learned.draft_s("mtp", 1, 3)
    learned.observe_draft("mtp", 1, 3, 50.0)  # compiles kernels
    assert learned.draft_s("mtp", 1, 3) == before < 2.0
    learned.observe_draft("mtp", 1, 3, 0.5)
    assert learned.draft_s("mtp", 1, 3) == 0.5


def test_single_slow_drafts_do_not_count() -> None:
    assert drafted(0.5, 0.6, 9.0, 0.4, 0.5).draft_s("mtp", 1, 3) == 0.5


def test_an_unknown_depth_is_estimated_by_the_nearest_of_the_nearest_rows() -> None:
    learned = plain_costs(lambda number: 1.0, 1, 16)
    for rows, depth, seconds in [(2, 3, 0.6), (8, 1, 0.5)] * 2:
        learned.observe_draft("mtp", rows, depth, seconds)
    assert learned.draft_s("mtp", 3, 1) == pytest.approx(0.2)
    assert learned.draft_s("mtp", 16, 3) == pytest.approx(1.5)
