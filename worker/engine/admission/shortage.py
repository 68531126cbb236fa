"""What failures for lack of memory have taught: the device has less than was expected, for a while."""

from collections import deque
from dataclasses import replace
from math import inf

from worker.engine.admission.decision import AdmissionLimits


class Shortage:
    """Bounds of the memory that admission may use, after the device had less than that. Each failure halves what rows
    may reserve, so those that are too many or too large are found in few steps. All that was learned doubles in five
    minutes, and is a thousand times as much after twenty, since another program may have taken the memory. Times are
    time.monotonic()."""

    def __init__(self) -> None:
        self._rows_bytes = self._alone_bytes = inf  # besides the weights, for all rows and for one that runs alone
        self._chunk = inf  # tokens
        self._at = 0.0
        self._tried_alone = deque[str](maxlen=64)  # ids of requests that have failed alone

    def bounded(self, limits: AdmissionLimits, now: float) -> AdmissionLimits:
        """Return the limits with what was learned. A row that fits into the memory is still admitted alone."""
        if self._rows_bytes == self._alone_bytes == inf:
            return limits
        resident, growth = limits.costs.resident_bytes, self._growth(now)
        rows, alone = (
            int(min(limits.max_bytes, resident + learned * growth)) for learned in (self._rows_bytes, self._alone_bytes)
        )
        return replace(limits, max_bytes=min(rows, alone), most_bytes=alone)

    def has_eased(self, since: float, now: float) -> bool:
        """Return True if rows that have waited since a plan of this time may fit by now: the limits grow by some 1 % in
        the five seconds between two such plans."""
        is_short = min(self._rows_bytes, self._alone_bytes) < inf
        return is_short and now - since >= 5.0 and self._growth(now) > self._growth(since)

    def longest_chunk(self, longest: int, now: float) -> int:
        """Return the most tokens of a forward of prompts, at most `longest`."""
        return longest if self._chunk == inf else int(min(longest, self._chunk * self._growth(now)))

    def _growth(self, now: float) -> float:
        since = min(11.0, (now - self._at) / 300)
        return float(2 ** (since * (since + 1) / 2))

    def record(self, reserved_bytes: int, chunk: int, now: float) -> None:
        """Learn from a failure. `reserved_bytes`: besides the weights, for the rows that were active and for cached
        prefixes, which give way first. `chunk`: tokens of the prompt's chunk that has failed, or 0. Shorter chunks,
        which are only slower, are tried before less memory."""
        growth = self._growth(now)
        self._rows_bytes, self._alone_bytes = self._rows_bytes * growth, self._alone_bytes * growth
        self._chunk, self._at = self._chunk * growth, now
        if chunk > 64:  # tokens; a forward that short still fills a GPU
            self._chunk = 64.0
        else:
            self._rows_bytes = min(self._rows_bytes, max(1, reserved_bytes) / 2)

    def is_too_large(self, id: str, row_bytes: int) -> bool:
        """Return True if this request has failed alone before: all that could be freed was free. No row of `row_bytes`,
        besides the weights, is admitted from now on."""
        if id in self._tried_alone:
            self._alone_bytes = min(self._alone_bytes, row_bytes - 1)
            return True
        self._tried_alone.append(id)
        return False
