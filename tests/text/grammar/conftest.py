"""Trials of schemas that wait for the machine as long as it takes."""

import pytest

from worker.text.grammar import trial


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a trial end by its CPU time only. It runs in a process of low priority, which may take more than the usual
    minute to get a second of a machine that runs other tests; the job then fails as `overloaded`."""
    monkeypatch.setattr(trial, "LIMITS", trial.LIMITS._replace(wall_s=900.0))
