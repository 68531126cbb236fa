"""All key and channel names in Redis, the names in them, and how long clients and workers keep what they hold."""

import re
from typing import Literal

Lane = Literal["interactive", "batch"]
JobFunction = Literal["chat", "count", "embed"]  # a kind of job
JobWebhooks = Literal["", "response", "none"]  # of the end of a job: those of a job, of a response, or none
LANES: tuple[Lane, ...] = ("interactive", "batch")

MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
JOB_ID = r"[A-Za-z0-9._-]{1,128}"
DEFAULT_MODEL = "default"  # of a request that names none, and of a worker without a name

TENANT_CHARACTERS = 128  # at most, as in `user` and `safety_identifier`
CACHE_KEY_CHARACTERS = 256  # at most
CONTROL = "sluice:control"
ALIASES = "sluice:aliases"  # hash: the model that an alias stands for, by the name of the alias
DEAD = "sluice:dead"
WEBHOOKS = "sluice:webhooks"  # hash: the endpoints as JSON, by id; what belongs to them begins so too, with a colon
WORKERS = "sluice:worker:*"
MODELS = "sluice:models:*"  # hashes of supervisors, and the lists of their commands
BATCHES = "sluice:batch:*"
QUEUES = "sluice:queue:*"
DRAINING = "draining"  # in a worker's hash and in that of its model: it ends its jobs, and takes no more
INDEX = ("lines", "suspects", "leases", "deadlines", "count-lines")
MAX_REQUEST_BYTES = 16_000_000  # of a job's body: the default of SLUICE_MAX_REQUEST_BYTES
JOB_LIFE_S = 86_400  # life of a job that has not ended: arq's default for a queued body
RESULT_TTL_S = 3600  # the default of SLUICE_RESULT_TTL_S
# Lives of a job, and of the log and the result of one that a client ends (SLUICE_LOG_TTL_S is 600 by default), in ms.
LIVES_MS = (JOB_LIFE_S * 1000, 600_000, RESULT_TTL_S * 1000)


def queue(model: str, lane: Lane) -> str:
    """Sorted set: ids of the queued and running jobs, arq's queue. The score is the time of submission in Unix
    milliseconds; a job whose score is in the future waits until then."""
    return f"sluice:queue:{model}:{lane}"


def parse_queue(key: bytes) -> tuple[str, Lane] | None:
    """Return the model and the lane; None if the key is not the key of a queue."""
    match = re.fullmatch(f"sluice:queue:({MODEL_NAME}):(interactive|batch)", key.decode("utf-8", "replace"))
    if match is None:
        return None
    return match[1], "batch" if match[2] == "batch" else "interactive"


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


def body(job_id: str) -> str:
    """String: the body of a queued or running job, in arq's format."""
    return f"arq:job:{job_id}"


def capture(model: str) -> str:
    """String: set while a capture of the model's jobs runs."""
    return f"sluice:capture:{model}"


def captured(model: str, job_id: str | None = None) -> str:
    """Sorted set: while a capture runs, the jobs that have just ended, by the time of their end in Unix milliseconds:
    the one of their submission in 15 digits, the lane, a colon and the id. With an id, a string: the body."""
    return f"sluice:captured:{model}" + ("" if job_id is None else f":{job_id}")


def cancel(job_id: str) -> str:
    """String: set while a request to cancel the job is pending."""
    return f"sluice:cancel:{job_id}"


def wake(model: str) -> str:
    """Channel that makes idle workers poll the queue."""
    return f"sluice:wake:{model}"


def model(name: str) -> str:
    """Hash: a field for each live worker of the model, "queue_limit jobs_per_s valid_until ..."."""
    return f"sluice:model:{name}"


def rows(model: str) -> str:
    """Hash: a field for each live worker of the model, its rows, by which claims share jobs: see share.lua."""
    return f"sluice:model:{model}:rows"


def fleet(model: str) -> str:
    """Hash: a field for each live worker of the model that claims by prefix, by its id: "until_ms at_ms free rows
    gap_ms token_us before_ns tokens_per_kib", and four times the milliseconds left of prompts and their number: of
    those with less than 250 ms, 1 s, 4 s, and more. `gap_ms`: between two rows that come free; `token_us`, `before_ns`:
    of a prompt's token, and of each pair of one and one before it; `tokens_per_kib`: of a body's text. The last three
    are 0 until they are measured."""
    return f"sluice:fleet:{model}"


def ready(model: str) -> str:
    """Sorted set: the workers of `fleet`, by when they will be done with their prompts, in Unix milliseconds."""
    return f"sluice:ready:{model}"


def prefix_mark(model: str, mark: str) -> str:
    """String: " wid wid ", the ids of the workers whose prefix cache holds what ends at this mark. With a cache per
    tenant, `mark` is "tenant:mark"."""
    return f"sluice:px:{model}:{mark}"


def worker(name: str) -> str:
    """Hash: a live worker's presence."""
    return f"sluice:worker:{name}"


def models(supervisor: str) -> str:
    """Hash: the models that a supervisor of several loads when jobs ask for them, by name, each a `models.Model` in
    JSON; a lease."""
    return f"sluice:models:{supervisor}"


def model_commands(supervisor: str) -> str:
    """List: what the supervisor is asked to do, each a `models.Command` in JSON, the oldest first. Who pushes one lets
    the list expire after a minute, so that none waits for a supervisor that has gone."""
    return f"sluice:models:{supervisor}:commands"


def restart(model: str) -> str:
    """String: the one worker of the model that restarts now; the next waits until it is back."""
    return f"sluice:restart:{model}"


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


def check_model_name(name: str) -> None:
    """Check a model name. Raises ValueError if `MODEL_NAME` does not match."""
    if not is_model_name(name):
        raise ValueError(f"a model name must match {MODEL_NAME}, and {name!r} does not")


def is_job_id(job_id: str) -> bool:
    """Return True if `JOB_ID` matches the whole id."""
    return re.fullmatch(JOB_ID, job_id) is not None


def check_job_id(job_id: str) -> None:
    """Check a job id. Raises ValueError if `JOB_ID` does not match."""
    if not is_job_id(job_id):
        raise ValueError(f"a job id must match {JOB_ID}, and {job_id!r} does not")
