"""`python -m worker` that verifies every draft, and is killed in the middle of its fourth verification: the tokens are
drawn, and neither committed nor delivered."""

import os
import signal
import threading
from collections.abc import Collection, Sequence
from typing import Any

from tests.end_to_end.verifying_all import run_worker
from worker.engine.cache.verification import Verification
from worker.queue.job.publisher import JobLog

_VERIFICATIONS = 4
_commit = Verification.commit
_begun = list[Verification]()
_record_written = JobLog.record_written
_delivered = threading.Event()  # a part of an answer is in Redis


def _record(log: JobLog, upto: int, sent: dict[str, str | int], **named: Any) -> None:
    _record_written(log, upto, sent, **named)
    if any(b'"delta"' in event for event in log.events[:upto]):
        _delivered.set()


def _commit_or_die(verifying: Verification, counts: Sequence[int], clear: Collection[int] = ()) -> None:
    _begun.append(verifying)
    if len(_begun) == _VERIFICATIONS:
        _delivered.wait(60)  # the engine may be ahead of the event loop
        os.kill(os.getpid(), signal.SIGKILL)
    _commit(verifying, counts, clear)


if __name__ == "__main__":
    Verification.commit = _commit_or_die  # type: ignore[method-assign]
    JobLog.record_written = _record  # type: ignore[method-assign]
    run_worker()
