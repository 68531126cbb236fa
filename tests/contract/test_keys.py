"""The exact key names in Redis, which other programs use."""

from collections.abc import Callable

import pytest
from arq.constants import job_key_prefix

from sluice.contract import keys

NAMES = {
    keys.queue("default", "interactive"): "sluice:queue:default:interactive",
    keys.queue("qwen3-4b", "batch"): "sluice:queue:qwen3-4b:batch",
    keys.index("default", "batch"): "sluice:index:2:default:batch",
    keys.log("a"): "sluice:log:a",
    keys.channel("a"): "sluice:ch:a",
    keys.result("a"): "sluice:result:a",
    keys.job("a"): "sluice:job:a",
    keys.cancel("a"): "sluice:cancel:a",
    keys.wake("default"): "sluice:wake:default",
    keys.model("default"): "sluice:model:default",
    keys.rows("default"): "sluice:model:default:rows",
    keys.worker("mac-1"): "sluice:worker:mac-1",
    keys.restart("default"): "sluice:restart:default",
    keys.models("mac-1"): "sluice:models:mac-1",
    keys.model_commands("mac-1"): "sluice:models:mac-1:commands",
    keys.MODELS: "sluice:models:*",
    keys.slot("5f2c", 1795305600): "sluice:cron:5f2c:1795305600",
    keys.WORKERS: "sluice:worker:*",
    keys.batch("batch_1"): "sluice:batch:batch_1",
    keys.batch_channel("batch_1"): "sluice:batch:batch_1",
    keys.batch_cancel("batch_1"): "sluice:batch:batch_1:cancel",
    keys.BATCHES: "sluice:batch:*",
    keys.CONTROL: "sluice:control",
    keys.DEAD: "sluice:dead",
    keys.WEBHOOKS: "sluice:webhooks",
    keys.ALIASES: "sluice:aliases",
}


def test_every_key_has_the_contract_s_name() -> None:
    assert list(NAMES) == list(NAMES.values())


def test_the_body_is_where_arq_looks_for_it() -> None:
    assert keys.body("a") == job_key_prefix + "a"


def test_a_queue_s_key_names_its_model_and_lane() -> None:
    assert keys.parse_queue(keys.queue("m-1", "batch").encode()) == ("m-1", "batch")
    assert keys.parse_queue(b"sluice:queue:m-1:fast") is keys.parse_queue(b"\xff") is None


@pytest.mark.parametrize(("check", "name"), [(keys.check_job_id, "a b"), (keys.check_model_name, "org/model")])
def test_a_bad_name_is_an_error_that_quotes_it(check: Callable[[str], None], name: str) -> None:
    check("a")
    with pytest.raises(ValueError, match=name):
        check(name)


def test_there_are_two_lanes_and_the_interactive_one_comes_first() -> None:
    assert keys.LANES == ("interactive", "batch")


@pytest.mark.parametrize(
    "job_id", ["a", "0", "chat-1", "_.-", "..", "-", "A" * 128, "3f2b8c1e-6d0a-4c57-9a11-000000000000"]
)
def test_a_good_job_id_is_taken(job_id: str) -> None:
    assert keys.is_job_id(job_id)


@pytest.mark.parametrize(
    "job_id", ["", "a b", "a:b", "a/b", "a\n", "\na", "ä", "A" * 129, "a*", "a\x00", "\ud800", "٣"]
)
def test_a_bad_job_id_is_refused(job_id: str) -> None:
    assert not keys.is_job_id(job_id)


@pytest.mark.parametrize("name", ["default", "0", "Qwen3-4B_4bit.v2", "a" * 64])
def test_a_good_model_name_is_taken(name: str) -> None:
    assert keys.is_model_name(name)


@pytest.mark.parametrize("name", ["", "-a", ".a", "_a", "org/model", "a:b", "a b", "a\n", "ä", "a" * 65])
def test_a_bad_model_name_is_refused(name: str) -> None:
    assert not keys.is_model_name(name)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("sluice:queue:default:interactive", None),
        ("sluice:queue:default:batch", None),
        ("sluice:queue:default", "it has no lane; queue jobs in sluice:queue:default:interactive or"),
        ("sluice:queue:default:", "it has no lane"),
        ("sluice:queue:default:fast", "'fast' is not a lane"),
        ("sluice:queue:default:batch:2", "'batch:2' is not a lane"),
        ("sluice:queue:", "'' is not the name of a model"),
        ("sluice:queue:org/model:batch", "'org/model' is not the name of a model"),
    ],
)
def test_a_key_that_is_no_queue_has_a_problem_and_the_right_name(key: str, problem: str | None) -> None:
    said = keys.queue_problem(key)
    assert (said is None) == (problem is None)
    assert said is None or said.startswith(str(problem))
