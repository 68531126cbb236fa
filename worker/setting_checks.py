"""Checks of settings whose values have a form of their own. Each returns the value, or raises ValueError."""

from sluice.contract.keys import is_model_name
from worker.schedule_times import Crontab, Hours


def checked_schedule(expression: str) -> str:
    """Check a crontab expression."""
    Crontab(expression)
    return expression


def checked_hours(hours: str) -> str:
    """Check hours of the day."""
    Hours.read(hours)
    return hours


def checked_models(models: str) -> str:
    """Check pairs of a requested and a served model."""
    for pair in models.split(","):
        requested, _, served = pair.partition("=")
        if not requested or requested != requested.strip() or not is_model_name(served):
            raise ValueError(f"{pair!r} must look like gpt-4o-mini=default")
        if "*" in requested[:-1]:
            raise ValueError(f"{pair!r} has a * before the end of the name; write it last, as in claude-*=default")
    return models
