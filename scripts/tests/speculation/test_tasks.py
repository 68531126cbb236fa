"""The chats of the tasks, and the cases that are measured."""

import pytest

from schemas import ChatRequest
from scripts.benchmarks.speculation.figures import Case
from scripts.benchmarks.speculation.proposers import PROPOSERS
from scripts.benchmarks.speculation.runner import cases
from scripts.benchmarks.speculation.tasks import TASKS, chats, edited


@pytest.mark.parametrize("name", TASKS)
def test_chats_of_a_run_are_the_beginning_of_one_list(name: str) -> None:
    assert chats(name, 1, 8) == chats(name, 1, 16)[:8]
    assert chats(name, 1, 8) != chats(name, 2, 8)


@pytest.mark.parametrize("name", TASKS)
def test_chats_are_valid_requests(name: str) -> None:
    for messages in chats(name, 0, 4):
        ChatRequest.model_validate({"messages": messages, **TASKS[name].fields})


def test_a_prediction_differs_in_one_word_of_twelve() -> None:
    words = [str(number) for number in range(24)]
    differing = [place for place, word in enumerate(edited(" ".join(words)).split(" ")) if word != words[place]]
    assert differing == [6, 18]


def test_random_weights_sample_what_is_not_expected_of_them() -> None:
    assert {name: task.by_random_weights.temperature for name, task in TASKS.items() if task.any_model} == {
        "edit": 0.0, "free": 1.0, "count": 1.0,
    }  # fmt: skip


def test_every_proposer_is_measured_with_a_task() -> None:
    assert {proposer for task in TASKS.values() for proposer in task.proposers} == set(PROPOSERS)


def test_cases_leave_out_proposers_without_effect() -> None:
    found = [*cases(["edit", "json"], [1, 4], [*PROPOSERS], ())]
    assert found == [
        Case(task, rows, proposer)
        for task, named in (("edit", ("prediction", "all")), ("json", ("grammar", "all")))
        for rows in (1, 4)
        for proposer in named
    ]


def test_cases_of_a_head_need_one() -> None:
    named = ["mtp", "mtp-fixed"]
    assert [*cases(["mixed"], [1], named, ())] == []
    assert [*cases(["mixed"], [1], named, ["head"])] == [Case("mixed", 1, each) for each in named]
