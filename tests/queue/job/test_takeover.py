"""After an outage the owners of lapsed leases come first."""

import pytest

from tests.fakes import Clock
from worker.queue.job import claims
from worker.queue.job.claims import Takeover


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(claims, "time", clock)
    return clock


def test_a_server_that_has_been_up_for_long_allows_it_at_once(clock: Clock) -> None:
    rule = Takeover(10)
    rule.record_first_answer(server_up_s=3600)
    assert rule.allowed()


def test_a_server_that_has_just_come_up_does_not_for_one_lease(clock: Clock) -> None:
    rule = Takeover(10)
    rule.record_first_answer(server_up_s=2)
    for _ in range(20):
        assert rule.allowed() == (clock.now >= 1010)
        rule.record_answer()
        clock.now += 1


def test_half_a_lease_without_an_answer_is_an_outage(clock: Clock) -> None:
    rule = Takeover(10)
    rule.record_first_answer(server_up_s=3600)
    clock.now += 4.9
    assert rule.allowed()
    rule.record_answer()
    clock.now += 5.1
    assert not rule.allowed()
    rule.record_answer()
    clock.now += 4.9
    assert not rule.allowed()
    rule.record_answer()
    clock.now += 4.9
    rule.record_answer()
    clock.now += 0.3
    assert rule.allowed()
