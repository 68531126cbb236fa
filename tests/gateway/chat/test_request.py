"""What a request asks of the gateway, the jobs of its choices, and their joined usage."""

from typing import Any

import pytest

from sluice.gateway.chat import ID_PREFIX, completion_of, job_ids, job_ids_of, read_chat_request, seen_by, total_usage
from sluice.interfaces.errors import ApiError

BASE = f"{ID_PREFIX}{'0f' * 16}"


def test_a_choice_has_the_request_without_n_and_only_the_first_has_its_seed() -> None:
    chat = read_chat_request({"n": 3, "seed": 7, "top_p": 1}, 100, 1000)
    choices = [chat.choice(index) for index in range(chat.choices)]
    assert choices[0] == {"seed": 7, "top_p": 1}
    seeds = [choice["seed"] for choice in choices]
    assert len(set(seeds)) == 3
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert choices == [chat.choice(index) for index in range(chat.choices)]


@pytest.mark.parametrize("seed", ["7", 1.5, True, None])
def test_a_seed_that_is_none_is_left_to_the_worker_to_refuse(seed: Any) -> None:
    assert read_chat_request({"n": 2, "seed": seed}, 100, 1000).choice(1)["seed"] is seed


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"n": 0}, 400, "n"),
        ({"n": 129}, 400, "n"),
        ({"n": "2"}, 400, "n"),
        ({"stream": 1}, 400, "stream"),
        ({"n": 11}, 413, "n"),
    ],
)
def test_what_the_gateway_cannot_do_is_refused_by_name(body: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_chat_request(body, 100, 1000)
    assert (refused.value.form.status, refused.value.param) == (status, param)


@pytest.mark.parametrize("choices", [1, 2, 128])
def test_the_jobs_of_an_answer_follow_from_the_id_of_the_first(choices: int) -> None:
    ids = job_ids(BASE, choices)
    assert len(set(ids)) == choices
    assert job_ids_of(ids[0]) == ids


@pytest.mark.parametrize("job_id", ["a", "a-n3", f"{BASE}-n3.1", f"{BASE}-n1000"])
def test_other_ids_are_one_job(job_id: str) -> None:
    assert job_ids_of(job_id) == [job_id]


@pytest.mark.parametrize(
    ("header", "jobs", "seen"), [(None, 1, [-1]), ("", 2, [-1, -1]), ("5", 1, [5]), ("5.-1.7", 3, [5, -1, 7])]
)
def test_a_last_event_id_is_the_position_in_each_job(header: str | None, jobs: int, seen: list[int]) -> None:
    assert seen_by(header, jobs) == seen


@pytest.mark.parametrize(
    ("header", "jobs"),
    [("5", 2), ("5.5", 1), ("-1", 1), ("-1.-1", 2), ("x", 1), ("9" * 16, 1), ("9" * 5000, 1), ("٣", 1)],
)
def test_a_last_event_id_that_the_gateway_did_not_send_is_refused(header: str, jobs: int) -> None:
    with pytest.raises(ApiError) as refused:
        seen_by(header, jobs)
    assert (refused.value.form.status, refused.value.param) == (400, "Last-Event-ID")


def test_usage_counts_the_prompt_once_and_sums_the_answers() -> None:
    one = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
    other = {**one, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 1}}
    assert total_usage([one, other]) == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_one_result_is_the_completion_as_it_is_stored() -> None:
    result = {"id": "a", "choices": [{"index": 0}], "usage": {"completion_tokens": 1}, "sluice": {}}
    assert completion_of([result]) == result
