"""A job's events, as the JSON Schema describes them: the values of the contract."""

from typing import Annotated

from pydantic import Field

from schemas.base import describe
from sluice.contract.events import (
    Cancelled,
    Delta,
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

describe(Usage, Timings, JobError, Started, Progress, Delta, Resumed, Restarted, Finished, Failed, Cancelled)

JobEvent = Annotated[
    Started | Progress | Delta | Resumed | Restarted | Finished | Failed | Cancelled,
    Field(discriminator="type"),
]
FinalEvent = Annotated[Finished | Failed | Cancelled, Field(discriminator="type")]
