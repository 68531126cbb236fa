"""Decides if a command that is repeated resumes the run of its files, replaces it, or is refused."""

from dataclasses import replace

from sluice.batch.files import RunState
from sluice.batch.options import RunOptions, RunPaths
from sluice.contract.batch import Batch, Problem, Problems
from sluice.errors import BatchRefused


def difference(saved: RunState, options: RunOptions, sha256: str) -> str | None:
    """Return how the saved run differs from the requested one, as a noun phrase; None if it can be resumed."""
    if saved.sha256 not in ("", sha256):
        return "another input"
    # Without a digest the file had not been read to its end, so no line was queued under another mapping.
    if saved.sha256 and options.models is not None and dict(options.models) != dict(saved.models):
        names = ", ".join(f"{name}={served}" for name, served in saved.models.items())
        return f"other models ({names or 'those named in the file'})"
    return None


def can_be_replaced(saved: RunState, paths: RunPaths) -> bool:
    """Return True if the saved run has not ended and has no results, so that replacing it loses nothing."""
    return not saved.batch.ended and not _has_lines(paths)


def refused(saved: RunState, paths: RunPaths, difference: str) -> BatchRefused:
    """Return the error for a run that cannot be resumed."""
    files = ", ".join(str(path) for path in (paths.output, paths.errors, paths.state) if path.exists())
    if saved.batch.ended:
        status = saved.batch.status
        rest = f"has ended ({status}) and was started with {difference}: name another output, or remove {files}"
    else:
        rest = f"was started with {difference}: use the same to resume it, or name another output"
    return BatchRefused(f"{paths.output} is the output of {saved.batch.id}, which {rest}")


def replaced(batch: Batch, difference: str, now: float) -> Batch:
    """Return the status of a run that another replaces."""
    problem = Problem(
        "replaced", f"It was started with {difference}, and was replaced by another run before a line was answered."
    )
    return replace(batch, errors=Problems((problem,))).enter("failed", now)


def _has_lines(paths: RunPaths) -> bool:
    return any(path.exists() and path.stat().st_size for path in (paths.output, paths.errors))
