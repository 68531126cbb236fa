from worker.supervisor.planned import PlannedModel
from worker.supervisor.supervisor import _Model


def test_a_job_that_was_requeued_when_its_model_left_waits_behind_those_that_it_left_for() -> None:
    model = _Model(PlannedModel("a", "path", 10, 5), since=100.0, waits_since=50.0)
    assert model.situation().waits_since == 100.0
    model.waits_since = 120.0
    assert model.situation().waits_since == 120.0
    model.asked_at = 110.0
    assert model.situation().waits_since == 110.0
    model.waits_since = model.asked_at = None
    assert model.situation().waits_since is None
