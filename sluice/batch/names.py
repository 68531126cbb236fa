"""Ids of runs, and of the jobs of their lines. A resumed run finds its jobs by these ids."""

import re
import uuid

_RUN = re.compile(r"batch_(?:[A-Za-z0-9._-]{1,40}_)?[0-9a-f]{12,32}")
_RETRY = re.compile(r"-\d+-r\d+\Z")


def new_run(stem: str = "") -> str:
    """Return a unique run id. `stem`: the input file's name without its suffix, a readable part of the id."""
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:40].strip("-")
    return f"batch_{word}_{uuid.uuid4().hex[:12]}" if word else f"batch_{uuid.uuid4().hex}"


def is_run(name: str) -> bool:
    """True if the name is a run id."""
    return _RUN.fullmatch(name) is not None


def job(run_id: str, line: int, retry: int = 0) -> str:
    """Return the id of the job for a line (from 1) and retry (from 0)."""
    return f"{run_id}-{line}-r{retry}" if retry else f"{run_id}-{line}"


def is_retry(job_id: str) -> bool:
    """True if the id is that of a retry, and not of the first job for its line."""
    return _RETRY.search(job_id) is not None
