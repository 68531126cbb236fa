"""What was said so far, and the request that goes on from there."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Conversation:
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of every request: max_tokens, seed ...
    turns: list[dict[str, str]] = field(default_factory=list)

    def request(self, message: str) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"messages": [*system, *self.turns, {"role": "user", "content": message}], **self.options}

    def add(self, message: str, answer: str) -> None:
        """A message that got no answer is dropped: most templates refuse two user messages in a row."""
        if answer:
            self.turns += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
