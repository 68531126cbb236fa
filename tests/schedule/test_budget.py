from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.budget import ALONE_STEPS, LEAST, MOST, StepBudget


def machine(step_s: float, *, tokens_per_s: float, decode_s: float, steps: int = 60) -> list[float]:
    """How long each step lasts on a machine of this speed, with rows decoding and a prompt without end."""
    budget, lasted = StepBudget(step_s), []
    for _ in range(steps):
        chunk = budget.tokens(rows=1)
        lasted.append(decode_s + chunk / tokens_per_s)
        budget.saw_decode(decode_s)
        budget.saw_prefill(chunk, chunk / tokens_per_s)
    return lasted


def test_a_step_may_take_longer_where_nobody_decodes() -> None:
    budget = StepBudget(0.1, tokens_per_s=1000.0)
    assert (budget.tokens(rows=0), budget.tokens(rows=1)) == (ALONE_STEPS * 100, 100)


@given(st.floats(200, 15_000), st.floats(0, 0.06))
def test_a_step_settles_at_its_target(tokens_per_s: float, decode_s: float) -> None:
    least_s = decode_s + LEAST / tokens_per_s
    assert all(s <= max(1.05 * 0.1, least_s) for s in machine(0.1, tokens_per_s=tokens_per_s, decode_s=decode_s)[40:])


@given(st.floats(1_000, 15_000), st.floats(0, 0.06))
def test_a_step_s_time_is_used(tokens_per_s: float, decode_s: float) -> None:
    """Else long prompts would wait for nothing."""
    assert min(machine(0.1, tokens_per_s=tokens_per_s, decode_s=decode_s)[40:]) >= 0.9 * 0.1


def test_a_prompt_advances_even_where_decoding_takes_all_the_time() -> None:
    budget = StepBudget(0.05)
    for _ in range(30):
        budget.saw_decode(0.2)
    assert budget.tokens(rows=16) == LEAST


SEEN = st.lists(st.tuples(st.integers(0, 4096), st.floats(1e-6, 5)), max_size=30)  # tokens, seconds


@given(st.floats(0.001, 2), SEEN, st.integers(1, 64))
def test_a_budget_has_its_bounds_whatever_was_measured(step_s: float, seen: list[tuple[int, float]], rows: int) -> None:
    budget = StepBudget(step_s)
    for tokens, seconds in seen:
        budget.saw_prefill(tokens, seconds)
        budget.saw_decode(seconds)
    assert LEAST <= budget.tokens(rows) <= MOST


def test_a_chunk_of_a_few_tokens_says_nothing_about_the_speed() -> None:
    budget = StepBudget(0.1, tokens_per_s=1000.0)
    before = budget.tokens(rows=1)
    for _ in range(50):
        budget.saw_prefill(LEAST - 1, 1.0)
    assert budget.tokens(rows=1) == before


def test_one_slow_step_does_not_halve_the_budget() -> None:
    budget = StepBudget(0.1, tokens_per_s=5000.0)
    budget.saw_prefill(500, 1.0)
    assert budget.tokens(rows=1) > 250
