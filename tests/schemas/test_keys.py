"""The exact key names in Redis, which other programs use."""

import pytest

from schemas import keys

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
    keys.slot("5f2c", 1795305600): "sluice:cron:5f2c:1795305600",
    keys.WORKERS: "sluice:worker:*",
    keys.batch("batch_1"): "sluice:batch:batch_1",
    keys.batch_channel("batch_1"): "sluice:batch:batch_1",
    keys.batch_cancel("batch_1"): "sluice:batch:batch_1:cancel",
    keys.BATCHES: "sluice:batch:*",
    keys.CONTROL: "sluice:control",
    keys.DEAD: "sluice:dead",
}


def test_every_key_has_the_contract_s_name() -> None:
    assert list(NAMES) == list(NAMES.values())


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
