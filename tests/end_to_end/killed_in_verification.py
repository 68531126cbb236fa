"""`python -m worker` that verifies every draft, and is killed in the middle of its fourth verification, or of a later
one if no unfinished answer has a part in Redis then: the tokens are drawn, and neither committed nor delivered."""

import os
import signal
import threading
from collections.abc import Collection, Sequence
from typing import Any

from tests.end_to_end.verifying_all import run_worker
from worker.engine.cache.slots import Verification
from worker.queue.job.publisher import JobLog

_VERIFICATIONS = 4
_commit = Verification.commit
_begun = list[Verification]()
_record_written = JobLog.record_written
_cut = set[str]()  # jobs of which a part, and not the end, is in Redis
_delivered = threading.Event()  # there is such a job


def _record(log: JobLog, upto: int, sent: dict[str, str | int], **named: Any) -> None:
    _record_written(log, upto, sent, **named)
    written = log.events[:upto]
    if any(b'"delta"' in event for event in written) and not any(b'"finished"' in event for event in written):
        _cut.add(log.claim.job_id)
    else:
        _cut.discard(log.claim.job_id)
    (_delivered.set if _cut else _delivered.clear)()


def _commit_or_die(verifying: Verification, counts: Sequence[int], clear: Collection[int] = ()) -> None:
    _begun.append(verifying)
    if len(_begun) >= _VERIFICATIONS and _delivered.wait(1):  # the engine may be ahead of the event loop
        os.kill(os.getpid(), signal.SIGKILL)
    _commit(verifying, counts, clear)


if __name__ == "__main__":
    Verification.commit = _commit_or_die  # type: ignore[method-assign]
    JobLog.record_written = _record  # type: ignore[method-assign]
    run_worker()
