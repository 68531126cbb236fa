"""The names of the client library, which `import sluice` offers."""

from sluice import openai, sse
from sluice.client import Client
from sluice.contract.batch import Batch
from sluice.contract.events import (
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
from sluice.errors import (
    BatchRefused,
    BatchTaken,
    CancelNotStored,
    JobCancelled,
    JobFailed,
    NoWorker,
    QueueFull,
    ServerFull,
    ServerUnreachable,
    SluiceError,
    UnknownBatch,
    UnknownJob,
    UnreadableLog,
)
from sluice.mapped import MappedClient
from sluice.queues import DeadLetter, Queue
from sluice.submission import ExtraKey, Submitted
from sluice.sync import SyncClient

__all__ = [
    "Batch",
    "BatchRefused",
    "BatchTaken",
    "CancelNotStored",
    "Cancelled",
    "Client",
    "DeadLetter",
    "Delta",
    "Event",
    "ExtraKey",
    "Failed",
    "Finished",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "MappedClient",
    "NoWorker",
    "Progress",
    "Queue",
    "QueueFull",
    "Restarted",
    "Resumed",
    "ServerFull",
    "ServerUnreachable",
    "SluiceError",
    "Started",
    "Submitted",
    "SyncClient",
    "Timings",
    "UnknownBatch",
    "UnknownJob",
    "UnreadableLog",
    "Usage",
    "openai",
    "sse",
]
