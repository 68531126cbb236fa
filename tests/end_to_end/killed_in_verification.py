"""`python -m worker` that verifies every draft, and is killed in the middle of its fourth verification: the tokens are
drawn, and neither committed nor delivered."""

import os
import signal
from collections.abc import Collection, Sequence

from tests.end_to_end.verifying_all import run_worker
from worker.engine.cache.verification import Verification

_VERIFICATIONS = 4
_commit = Verification.commit
_begun = list[Verification]()


def _commit_or_die(verifying: Verification, counts: Sequence[int], clear: Collection[int] = ()) -> None:
    _begun.append(verifying)
    if len(_begun) == _VERIFICATIONS:
        os.kill(os.getpid(), signal.SIGKILL)
    _commit(verifying, counts, clear)


if __name__ == "__main__":
    Verification.commit = _commit_or_die  # type: ignore[method-assign]
    run_worker()
