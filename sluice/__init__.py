"""Client library for backends: submit a chat, stream its tokens, fetch its result, cancel it; run files of chats
offline.

`Client` is for asyncio, `SyncClient` for threads; `sse` streams a job to a browser, `openai` to OpenAI clients.

Needs redis-py and nothing else; the daemon's packages `worker` and `schemas` are never imported.
"""

__version__ = "0.1.0"

from sluice import openai, sse
from sluice.batch.status import Batch
from sluice.client import Client
from sluice.dead_letters import DeadLetter
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
from sluice.queues import Queue
from sluice.submission import ExtraKey, Submitted
from sluice.sync import SyncClient
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
    "__version__",
    "openai",
    "sse",
]
