from worker.engine.speculation.losses import EVERY, MOST, RETRIED, WANTED, Baseline


def plain_steps(baseline: Baseline, steps: int, *, timed: bool = True) -> list[int]:
    """Return the plain steps among steps that verify drafts otherwise."""
    due = list[int]()
    for step in range(steps):
        if baseline.advance():
            due.append(step)
            if timed:
                baseline.observe_plain()
    return due


def test_drafts_are_verified_until_plain_steps_were_not_measured_for_long() -> None:
    assert plain_steps(Baseline(), EVERY) == []
    assert plain_steps(Baseline(), EVERY + 20) == [*range(EVERY, EVERY + WANTED)]


def test_few_steps_are_plain() -> None:
    assert len(plain_steps(Baseline(), 10_000)) <= 10_000 * WANTED / EVERY
    assert len(plain_steps(Baseline(), 10_000, timed=False)) <= 10_000 * MOST / EVERY


def test_plain_steps_that_cannot_be_timed_do_not_end_drafts() -> None:
    due = plain_steps(Baseline(), 3 * EVERY, timed=False)
    assert due[:MOST] == [*range(EVERY, EVERY + MOST)]
    assert len(due) <= 2 * MOST


def test_no_step_is_plain_for_the_sake_of_its_cost_if_others_are_anyway() -> None:
    baseline = Baseline()
    for _ in range(5 * EVERY):
        assert not baseline.advance()
        baseline.observe_plain()


def test_rows_of_which_no_plain_step_is_known_run_some_first() -> None:
    baseline = Baseline()
    assert [baseline.advance(known=False), baseline.advance(known=False), baseline.advance()] == [True, True, False]


def test_rows_that_change_too_often_to_be_measured_verify_drafts_nevertheless() -> None:
    baseline = Baseline()
    due = [baseline.advance(known=False) for _ in range(EVERY)]
    assert sum(due) == MOST * EVERY / RETRIED
    assert due[:MOST] == [True] * MOST
