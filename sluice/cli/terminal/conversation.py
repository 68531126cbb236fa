"""The state of a conversation, from which each request is built."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Conversation:
    """Turns, options and pending images of a chat."""

    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # sent with every request: max_tokens, seed ...
    images: list[str] = field(default_factory=list)  # data: URLs, sent with the next message
    turns: list[dict[str, Any]] = field(default_factory=list)

    def request(self, message: str) -> dict[str, Any]:
        """Return the request that adds this message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"messages": [*system, *self.turns, self._turn(message)], **self.options}

    def add(self, message: str, answer: str) -> None:
        """Append a turn, and clear the pending images. A message without an answer is dropped, since most templates
        reject two user messages in a row."""
        if answer:
            self.turns += [self._turn(message), {"role": "assistant", "content": answer}]
        self.images.clear()

    def _turn(self, message: str) -> dict[str, Any]:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return {"role": "user", "content": [*images, {"type": "text", "text": message}] if images else message}
