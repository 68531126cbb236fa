"""What a stand-in for a grammar does with drafts, by its own way of accepting tokens one by one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from worker.request import GrammarAhead


class StepwiseGrammar(ABC):
    takes_drafts = True
    is_free = False

    @abstractmethod
    def accept(self, token: int) -> None: ...

    @abstractmethod
    def bitmask(self) -> bytes | None: ...

    @abstractmethod
    def rollback(self, count: int) -> None: ...

    @property
    @abstractmethod
    def accepted(self) -> int: ...

    def ahead(self, draft: Sequence[int]) -> GrammarAhead:
        masks = self.masks_along(draft)
        return GrammarAhead(mask=masks[-1] if len(masks) > len(draft) else None)

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        return len(self.masks_along(tokens)) - 1

    def masks_along(self, draft: Sequence[int]) -> list[bytes | None]:
        masks, accepted = [self.bitmask()], 0
        try:
            for token in draft:
                if not _allows(masks[-1], token):
                    break
                self.accept(token)
                accepted += 1
                masks.append(self.bitmask())
        finally:
            self.rollback(accepted)
        return masks


def _allows(mask: bytes | None, token: int) -> bool:
    return mask is None or (token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1))
