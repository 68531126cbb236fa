import pytest

from sluice.batch import feeder


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder, "POLL_S", 0.02)
    monkeypatch.setattr("sluice.batch.run.POLL_S", 0.02)
    monkeypatch.setattr(feeder, "_LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(feeder, "_LOST_WAIT_S", 0.05)
    monkeypatch.setattr(feeder, "_PATIENCE_S", 0.5)
