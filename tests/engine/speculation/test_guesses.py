from worker.engine.speculation.forced import GuessTable


def test_a_guess_is_made_after_one_observation() -> None:
    guesses = GuessTable()
    assert guesses.lookup(1) is None
    guesses.observe(1, 5)
    guess = guesses.lookup(1)
    assert guess is not None
    assert guess.token == 5
    assert 0.5 < guess.acceptance < 0.9


def test_a_guess_that_is_always_right_becomes_sure() -> None:
    guesses = GuessTable()
    for _ in range(30):
        guesses.observe(1, 5)
    guess = guesses.lookup(1)
    assert guess is not None
    assert 0.9 < guess.acceptance < 1


def test_a_guess_changes_with_what_is_drawn() -> None:
    guesses = GuessTable()
    for token in [5] * 10 + [6] * 10:
        guesses.observe(1, token)
    guess = guesses.lookup(1)
    assert guess is not None
    assert guess.token == 6
    assert 0.5 < guess.acceptance <= 1


def test_a_token_that_is_seldom_drawn_is_hardly_probable() -> None:
    guesses = GuessTable()
    for token in range(50):
        guesses.observe(1, token)
    guess = guesses.lookup(1)
    assert guess is not None
    assert guess.acceptance < 0.2


def test_entries_that_were_not_observed_for_long_are_dropped() -> None:
    guesses = GuessTable()
    for key in range(2_000):
        guesses.observe(key, 1)
    assert guesses.lookup(0) is None
    assert guesses.lookup(1_999) is not None
