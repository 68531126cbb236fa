"""From an answer's tokens to the text a client may see."""

from collections.abc import Sequence

from worker.text.stop import StopStrings
from worker.text.tokenizer import Detokenizer


class Output:
    """Detokenizer, then stop strings. Feeding it the delivered tokens again brings it back to where it was."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._stops = detokenizer, StopStrings(stops)

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def feed(self, token: int) -> str:
        self._detokenizer.add_token(token)
        return self._stops.feed(self._detokenizer.last_segment)

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        self._detokenizer.finalize()
        return self._stops.feed(self._detokenizer.last_segment) + self._stops.flush()
