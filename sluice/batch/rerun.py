"""A command that is run again: on a run that it began, or on another's files."""

from dataclasses import replace

from sluice.batch.options import RunOptions, RunPaths
from sluice.batch.state import RunState
from sluice.batch.status import Batch, Problem, Problems
from sluice.errors import BatchRefused


def difference(saved: RunState, wish: RunOptions, sha256: str) -> str | None:
    """Return how the saved run differs from the request; None if it can be resumed."""
    if saved.sha256 not in ("", sha256):
        return "another input"
    # While its file was read for the first time, nothing was queued by any name.
    if saved.sha256 and wish.models is not None and dict(wish.models) != dict(saved.models):
        names = ", ".join(f"{name}={served}" for name, served in saved.models.items())
        return f"other models ({names or 'as they are in the file'})"
    return None


def may_begin_anew(saved: RunState, place: RunPaths) -> bool:
    """Return True if a run with other options has nothing to lose: no line of it has ended."""
    return not saved.batch.ended and not _has_lines(place)


def refused(saved: RunState, place: RunPaths, difference: str) -> BatchRefused:
    """Return the error for a run that cannot be resumed."""
    files = ", ".join(str(path) for path in (place.output, place.errors, place.state) if path.exists())
    if saved.batch.ended:
        way_out = (
            f"has ended ({saved.batch.status}) and began with {difference}: name another output, or remove {files}"
        )
    else:
        way_out = f"began with {difference}: give it the same to resume it, or name another output"
    return BatchRefused(f"{place.output} is the output of {saved.batch.id}, which {way_out}")


def replaced(batch: Batch, difference: str, now: float) -> Batch:
    """Return the status of a run that another replaces."""
    problem = Problem(
        "replaced", f"It was begun with {difference}, and had answered nothing when another took its place."
    )
    return replace(batch, errors=Problems((problem,))).enter("failed", now)


def _has_lines(place: RunPaths) -> bool:
    return any(path.exists() and path.stat().st_size for path in (place.output, place.errors))
