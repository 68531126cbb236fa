from worker.schedule.speculation.habits import Habits


def test_a_place_is_known_after_it_was_seen_once() -> None:
    habits = Habits()
    assert habits.guess(1) is None
    habits.observe(1, 5)
    guess = habits.guess(1)
    assert guess is not None
    assert guess.token == 5
    assert 0.5 < guess.chance < 0.9


def test_a_guess_that_is_always_right_becomes_sure() -> None:
    habits = Habits()
    for _ in range(30):
        habits.observe(1, 5)
    guess = habits.guess(1)
    assert guess is not None
    assert 0.9 < guess.chance < 1


def test_a_habit_changes_with_what_is_seen() -> None:
    habits = Habits()
    for token in [5] * 10 + [6] * 10:
        habits.observe(1, token)
    guess = habits.guess(1)
    assert guess is not None
    assert guess.token == 6
    assert 0.5 < guess.chance <= 1


def test_a_token_that_is_seldom_drawn_is_hardly_probable() -> None:
    habits = Habits()
    for token in range(50):
        habits.observe(1, token)
    guess = habits.guess(1)
    assert guess is not None
    assert guess.chance < 0.2


def test_places_that_were_not_seen_for_long_are_forgotten() -> None:
    habits = Habits()
    for place in range(2_000):
        habits.observe(place, 1)
    assert habits.guess(0) is None
    assert habits.guess(1_999) is not None
