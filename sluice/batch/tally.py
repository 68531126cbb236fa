"""The sums of a run. They are taken from what is in its files alone, so a run that is gone on with counts the same."""

from collections import Counter
from typing import Any

from sluice.batch.names import is_retry
from sluice.batch.status import BatchUsage, InputTokens, OutputTokens


class Tally:
    def __init__(self) -> None:
        self.completed, self.retried = 0, 0
        self.failures = Counter[str]()
        self._tokens = Counter[str]()

    @property
    def failed(self) -> int:
        return self.failures.total()

    @property
    def usage(self) -> BatchUsage:
        into, out = self._tokens["prompt"], self._tokens["completion"]
        cached, reasoning = self._tokens["cached"], self._tokens["reasoning"]
        return BatchUsage(into, out, into + out, InputTokens(cached), OutputTokens(reasoning))

    def add(self, said: dict[str, Any]) -> None:
        """A line of the output file or of the error file."""
        self.retried += is_retry(said["id"])
        match said:
            case {"error": {"code": str(code)}}:
                self.failures[code] += 1
            case {"response": {"body": dict(body)}}:
                self.completed += 1
                self._add_usage(body.get("usage") or {})

    def _add_usage(self, usage: dict[str, Any]) -> None:
        self._tokens["prompt"] += usage.get("prompt_tokens", 0)
        self._tokens["completion"] += usage.get("completion_tokens", 0)
        self._tokens["cached"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self._tokens["reasoning"] += (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
