from itertools import pairwise

import pytest

from worker.engine.speculation.losses import LONGEST_PAUSE, PAUSE_AFTER_JOIN, Backoff


def asked(backoff: Backoff, steps: int, worthwhile: bool = False) -> list[int]:
    """Return the steps in which drafts are asked for."""
    due = list[int]()
    for step in range(steps):
        if backoff.advance():
            backoff.observe(worthwhile)
            due.append(step)
    return due


def test_drafts_that_are_worthwhile_are_asked_for_in_every_step() -> None:
    assert asked(Backoff(), 50, worthwhile=True) == [*range(50)]


def test_drafts_that_are_not_worthwhile_are_asked_for_ever_more_rarely() -> None:
    backoff = Backoff()
    due = asked(backoff, 1_000)
    apart = [later - sooner for sooner, later in pairwise(due)]
    assert apart == sorted(apart)
    assert apart[0] == 1
    assert apart[-1] == LONGEST_PAUSE + 1
    assert len(due) < 1_000 / LONGEST_PAUSE + 12


@pytest.mark.parametrize("before", [0, 7, 100, 1_001])
def test_a_new_chance_is_noticed_after_the_longest_pause_at_most(before: int) -> None:
    backoff = Backoff()
    asked(backoff, before)
    due = asked(backoff, 40, worthwhile=True)
    assert due[0] <= LONGEST_PAUSE
    assert due == [*range(due[0], 40)]


@pytest.mark.parametrize("before", [0, 7, 100, 1_001])
def test_a_row_that_joins_is_asked_soon(before: int) -> None:
    backoff = Backoff()
    asked(backoff, before)
    backoff.join()
    assert asked(backoff, 40)[0] <= PAUSE_AFTER_JOIN


def test_rows_that_join_all_the_time_are_not_asked_all_the_time() -> None:
    backoff = Backoff()
    asked(backoff, 100)
    due = list[int]()
    for step in range(100):
        backoff.join()
        due += [step] * len(asked(backoff, 1))
    assert {later - sooner for sooner, later in pairwise(due)} == {PAUSE_AFTER_JOIN + 1}


def test_a_new_group_begins_with_the_pause_of_the_last() -> None:
    backoff = Backoff()
    first = len(asked(backoff, 40))
    asks = [len(asked(backoff := Backoff(backoff), 40)) for _ in range(5)]
    assert first > max(asks)
    assert max(asks) <= 5


def test_a_new_group_is_asked_at_once() -> None:
    backoff = Backoff()
    asked(backoff, 100)
    assert asked(Backoff(backoff), 1) == [0]


def test_drafts_that_were_worthwhile_are_asked_for_in_every_step_of_a_new_group() -> None:
    backoff = Backoff()
    asked(backoff, 100)
    asked(backoff, 40, worthwhile=True)
    assert asked(Backoff(backoff), 9, worthwhile=True) == [*range(9)]
