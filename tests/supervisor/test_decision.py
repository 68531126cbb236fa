from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.supervisor.decision import PATIENCE_S, TURN_S, Decision, Demand, Situation, decide, shares

NOW = 1000.0


def loaded(name: str, **fields: object) -> Situation:
    return replace(Situation(name, 10, True, loaded=True), **fields)  # type: ignore[arg-type]


def unloaded(name: str, **fields: object) -> Situation:
    return replace(Situation(name, 10, False), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("leasts", "budget", "expected"),
    [
        ([10, 10], 40, [20, 20]),  # all fit: they divide the budget
        ([10, 30], 80, [20, 60]),
        ([10, 10, 10], 25, [12, 12, 12]),  # any two of three
        ([20, 3, 3], 21, [21, 3, 3]),  # the largest alone, or the small ones
        ([30, 10, 10], 44, [33, 11, 11]),
    ],
)
def test_as_many_of_the_largest_as_fit_divide_the_budget(leasts: list[int], budget: int, expected: list[int]) -> None:
    assert shares([Demand(least) for least in leasts], budget) == expected


def test_a_given_share_is_kept_and_the_others_divide_the_rest() -> None:
    assert shares([Demand(10, given=15), Demand(10)], 40) == [15, 25]
    assert shares([Demand(10, given=40), Demand(10)], 40) == [40, 10]


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=6), st.integers(50, 200))
def test_no_share_is_above_the_budget_or_below_what_the_model_needs(
    models: list[tuple[int, bool]], budget: int
) -> None:
    demands = [Demand(least, least if is_given else None) for least, is_given in models]
    found = shares(demands, budget)
    assert all(demand.least <= share <= budget for demand, share in zip(demands, found, strict=True))


def test_a_model_with_a_waiting_job_is_loaded_if_there_is_room() -> None:
    assert decide([loaded("a"), unloaded("b", waits_since=NOW), unloaded("c")], 20, NOW) == Decision(load=("b",))


def test_the_least_recently_used_idle_model_leaves_first_and_the_next_is_loaded_when_it_has_gone() -> None:
    models = [loaded("a", used_at=5.0), loaded("b", used_at=3.0), unloaded("c", waits_since=NOW)]
    assert decide(models, 20, NOW) == Decision(unload=("b",))
    leaving = replace(models[1], loaded=False, leaving=True)
    assert decide([models[0], leaving, models[2]], 20, NOW) == Decision()
    assert decide([models[0], unloaded("b"), models[2]], 20, NOW) == Decision(load=("c",))


def test_a_model_whose_end_of_loading_was_noted_late_does_not_count_as_used_then() -> None:
    models = [loaded("a", used_at=5.0), loaded("c", used_at=4.0, loaded_at=6.0), unloaded("b", waits_since=NOW)]
    assert decide(models, 20, NOW) == Decision(unload=("c",))


def test_a_model_with_jobs_leaves_only_for_a_job_that_has_waited_and_after_its_turn() -> None:
    models = [
        loaded("a", busy=True, loaded_at=NOW - TURN_S),
        loaded("b", busy=True, loaded_at=NOW - 2 * TURN_S),
        unloaded("c", waits_since=NOW - 1),
    ]
    assert decide(models, 20, NOW) == Decision()
    models[2] = replace(models[2], waits_since=NOW - PATIENCE_S)
    assert decide(models, 20, NOW) == Decision(unload=("b",))
    models[1] = replace(models[1], loaded_at=NOW - 1)
    assert decide(models, 20, NOW) == Decision(unload=("a",))


def test_no_model_leaves_in_vain() -> None:
    models = [loaded("a"), loaded("b", busy=True), unloaded("c", nbytes=20, waits_since=NOW)]
    assert decide(models, 20, NOW) == Decision()


def test_no_more_models_leave_than_have_to() -> None:
    models = [loaded("a", nbytes=5, used_at=1.0), loaded("b", nbytes=15, used_at=2.0), unloaded("c", waits_since=NOW)]
    assert decide(models, 20, NOW) == Decision(unload=("b",))


def test_the_job_that_waits_longest_comes_first() -> None:
    models = [unloaded("a", waits_since=NOW - 1), unloaded("b", waits_since=NOW - 2)]
    assert decide(models, 10, NOW) == Decision(load=("b",))


def test_a_large_model_is_not_kept_out_by_small_ones_for_ever() -> None:
    busy = loaded("a", busy=True, loaded_at=NOW - 1)
    models = [busy, unloaded("large", nbytes=20, waits_since=NOW - PATIENCE_S), unloaded("small", waits_since=NOW)]
    assert decide(models, 20, NOW) == Decision()
    models[1] = replace(models[1], waits_since=NOW - 1)
    assert decide(models, 20, NOW) == Decision(load=("small",))


def test_an_idle_model_leaves_after_its_time() -> None:
    model = loaded("a", used_at=NOW - 60, idle_unload_s=60.0)
    assert decide([model], 10, NOW) == Decision(unload=("a",))
    assert decide([model], 10, NOW - 1) == Decision()
    assert decide([replace(model, busy=True)], 10, NOW) == Decision()
    assert decide([replace(model, idle_unload_s=None)], 10, NOW) == Decision()


def test_a_wanted_model_takes_free_room_only_and_a_failed_one_waits() -> None:
    assert decide([loaded("a"), unloaded("b", wanted=True)], 20, NOW) == Decision(load=("b",))
    assert decide([loaded("a"), unloaded("b", wanted=True)], 19, NOW) == Decision()
    assert decide([unloaded("b", wanted=True, waits_since=NOW, ready_at=NOW + 1)], 20, NOW) == Decision()


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Situation], int]:
    """Models that fit the budget now, in any state."""
    budget, free, models = 100, 100, list[Situation]()
    for number in range(draw(st.integers(1, 6))):
        nbytes = draw(st.integers(1, 100))
        in_memory = nbytes <= free and draw(st.booleans())
        free -= nbytes if in_memory else 0
        state = draw(st.sampled_from(["loading", "loaded", "leaving"]))
        times = st.floats(0, NOW)
        models.append(
            Situation(
                f"m{number}",
                nbytes,
                in_memory,
                loaded=in_memory and state == "loaded",
                leaving=in_memory and state == "leaving",
                waits_since=draw(st.none() | times),
                wanted=draw(st.booleans()),
                ready_at=draw(st.sampled_from([0.0, NOW + 1])),
                busy=draw(st.booleans()),
                used_at=draw(times),
                loaded_at=draw(times),
                idle_unload_s=draw(st.none() | st.floats(1, NOW)),
            )
        )
    return models, budget


@given(situations())
def test_memory_never_exceeds_the_budget_and_each_model_is_in_one_list_at_most(
    given: tuple[list[Situation], int],
) -> None:
    models, budget = given
    decision = decide(models, budget, NOW)
    by_name = {model.name: model for model in models}
    held = sum(model.nbytes for model in models if model.in_memory)
    assert held + sum(by_name[name].nbytes for name in decision.load) <= budget
    assert len({*decision.load, *decision.unload}) == len(decision.load) + len(decision.unload)
    assert all(by_name[name].loaded for name in decision.unload)
    assert not any(by_name[name].in_memory for name in decision.load)


@given(situations())
def test_the_oldest_job_is_served_once_nothing_is_busy(given: tuple[list[Situation], int]) -> None:
    models, budget = given
    models = [replace(model, busy=False, ready_at=0.0) for model in models]
    models = [replace(model, loaded=model.in_memory, leaving=False) for model in models]
    needing = [model for model in models if not model.in_memory and model.waits_since is not None]
    if not needing:
        return
    oldest = min(needing, key=lambda model: model.waits_since or 0.0)
    decision = decide(models, budget, NOW)
    if oldest.name not in decision.load:
        left = [model for model in models if model.name not in decision.unload]
        assert oldest.nbytes + sum(model.nbytes for model in left if model.in_memory) <= budget
