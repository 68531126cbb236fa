from itertools import pairwise

import pytest

from worker.schedule.speculation.backoff import LONGEST_PAUSE, Backoff


def asked(backoff: Backoff, steps: int, worthwhile: bool = False) -> list[int]:
    """Return the steps in which drafts are asked for."""
    due = list[int]()
    for step in range(steps):
        if backoff.is_due():
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
