"""What a backend imports: submit a chat, stream its tokens, fetch its result, cancel it.

Needs redis-py and nothing else; the daemon's packages `worker` and `schemas` are never imported.
"""

from sluice.client import Client, Submitted
from sluice.errors import JobCancelled, JobFailed, SluiceError, UnknownJob
from sluice.wire import (
    Cancelled,
    Delta,
    Event,
    Failed,
    Finished,
    JobError,
    Progress,
    Restarted,
    Resumed,
    Started,
    Timings,
    Usage,
)

__all__ = [
    "Cancelled",
    "Client",
    "Delta",
    "Event",
    "Failed",
    "Finished",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "Progress",
    "Restarted",
    "Resumed",
    "SluiceError",
    "Started",
    "Submitted",
    "Timings",
    "UnknownJob",
    "Usage",
]
