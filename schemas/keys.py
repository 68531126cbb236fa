"""All key and channel names in Redis. `sluice/wire.py` has the same for clients; a test holds them equal."""

import re
from typing import Literal

Lane = Literal["interactive", "batch"]
LANES: tuple[Lane, ...] = ("interactive", "batch")

MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
JOB_ID = r"[A-Za-z0-9._-]{1,128}"

TENANT_CHARACTERS = 128  # at most, as in `user` and `safety_identifier`
CACHE_KEY_CHARACTERS = 256  # at most
CONTROL = "sluice:control"
DEAD = "sluice:dead"
WORKERS = "sluice:worker:*"
BATCHES = "sluice:batch:*"
QUEUES = "sluice:queue:*"
INDEX = ("lines", "suspects", "leases", "deadlines", "count-lines")
CANCEL_S = 3600  # seconds that a request to cancel is kept


def queue(model: str, lane: Lane) -> str:
    """Sorted set of job ids, scored by the time they were queued in milliseconds: arq's queue."""
    return f"sluice:queue:{model}:{lane}"


def queue_problem(key: str) -> str | None:
    """Return why no worker takes jobs from a key that begins like a queue's, and what would be right; None for the key
    of a queue."""
    model, _, lane = key.removeprefix("sluice:queue:").partition(":")
    if not re.fullmatch(MODEL_NAME, model):
        return f"{model[:80]!r} is not the name of a model; a name matches {MODEL_NAME}"
    if lane in LANES:
        return None
    what = f"{lane[:80]!r} is not a lane" if lane else "it has no lane"
    return f"{what}; queue jobs in {queue(model, 'interactive')} or {queue(model, 'batch')}"


def index(model: str, lane: Lane) -> str:
    """Sorted set: a copy of the queue. With a suffix of `INDEX`: another part of the queue's index by tenant and user.
    The 2 is the version of its form."""
    return f"sluice:index:2:{model}:{lane}"


def log(job_id: str) -> str:
    """List of the job's events; an event's `seq` is its index."""
    return f"sluice:log:{job_id}"


def channel(job_id: str) -> str:
    """Channel on which each event is published when it is appended."""
    return f"sluice:ch:{job_id}"


def result(job_id: str) -> str:
    """String: the chat.completion object, or the final event of a job that did not finish."""
    return f"sluice:result:{job_id}"


def job(job_id: str) -> str:
    """Hash: state, attempt, lane, tenant, worker, times, and the state for resuming."""
    return f"sluice:job:{job_id}"


def cancel(job_id: str) -> str:
    """String: set while a request to cancel the job is pending."""
    return f"sluice:cancel:{job_id}"


def wake(model: str) -> str:
    """Channel that makes idle workers poll the queue."""
    return f"sluice:wake:{model}"


def model(name: str) -> str:
    """Hash: a field for each live worker of the model, "queue_limit jobs_per_s valid_until"."""
    return f"sluice:model:{name}"


def rows(model: str) -> str:
    """Hash: a field for each live worker of the model, its rows, by which claims share jobs: see share.lua."""
    return f"sluice:model:{model}:rows"


def worker(name: str) -> str:
    """Hash: a live worker's presence."""
    return f"sluice:worker:{name}"


def slot(name: str, unix_s: int) -> str:
    """String: the worker that has taken this slot of a cron job."""
    return f"sluice:cron:{name}:{unix_s}"


def batch(batch_id: str) -> str:
    """String: the state of an offline run, which its feeder writes once a second."""
    return f"sluice:batch:{batch_id}"


def batch_channel(batch_id: str) -> str:
    """Channel on which the run's object is published when its state changes."""
    return f"sluice:batch:{batch_id}"


def batch_cancel(batch_id: str) -> str:
    """String: set while a request to cancel the run is pending."""
    return f"sluice:batch:{batch_id}:cancel"


def is_model_name(name: str) -> bool:
    """Return True if `MODEL_NAME` matches the whole name."""
    return re.fullmatch(MODEL_NAME, name) is not None


def is_job_id(job_id: str) -> bool:
    """Return True if `JOB_ID` matches the whole id."""
    return re.fullmatch(JOB_ID, job_id) is not None
