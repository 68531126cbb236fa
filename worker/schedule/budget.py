"""How many prompt tokens fit into a step without holding up the rows that decode."""

LEAST, MOST = 16, 2048  # MOST: beyond it a larger chunk is hardly faster
# Where nobody decodes, nobody waits for the step but those who come or cancel in it.
ALONE_STEPS = 4
_WEIGHT = 0.2  # of the newest measurement


class StepBudget:
    """Keeps a step near its target, from the prefill speed and the decode time measured while running."""

    def __init__(self, step_s: float, tokens_per_s: float = 2000.0) -> None:
        self._step_s, self._tokens_per_s, self._decode_s = step_s, tokens_per_s, 0.0
        self.forward_s = 0.0  # what a chunk costs before its first token: a pass over the weights

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        if tokens >= LEAST and seconds > 0:  # fewer measure the overhead, not the speed
            tokens_s = max(seconds - self.forward_s, seconds / 2)
            self._tokens_per_s += _WEIGHT * (tokens / tokens_s - self._tokens_per_s)

    def saw_decode(self, seconds: float) -> None:
        self._decode_s += _WEIGHT * (seconds - self._decode_s)

    def tokens(self, rows: int) -> int:
        """For the next step, with `rows` decoding, if they are all of one prompt; see `chunk_tokens`."""
        spare_s = self._step_s - self._decode_s if rows else ALONE_STEPS * self._step_s
        return max(LEAST, min(MOST, int((spare_s - self.forward_s) * self._tokens_per_s)))

    @property
    def chunk_tokens(self) -> int:
        """So many tokens more could be computed in the time that another chunk costs before its first."""
        return int(self.forward_s * self._tokens_per_s)
