"""Token counts of a response."""

from typing import Any

from sluice import wire


class Counts:
    """Counts the tokens of reasoning by the deltas that carry them."""

    def __init__(self) -> None:
        self.reasoning_tokens = 0

    def add(self, event: wire.Delta, *, reasons: bool) -> None:
        """Count a delta. `reasons`: reasoning was being written before it."""
        is_other = bool(event.content or event.tool_calls)
        if event.reasoning or (reasons and not is_other):
            self.reasoning_tokens += len(event.token_ids)


def as_usage(usage: wire.Usage, counts: Counts) -> dict[str, Any]:
    """Return a job's usage in the form of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
