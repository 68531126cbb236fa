"""An image on its way through the vision tower, and the features of those that are through."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.schedule.recent import Recent
from worker.schedule.sequence import Picture


@dataclass(frozen=True, slots=True)
class Features:
    """What the language model gets of an image: a row for each token of its span."""

    rows: mx.array  # (tokens, width), in place of the tokens' embeddings
    deepstack: tuple[mx.array, ...] = ()  # the same shape; each is added behind a layer, from the first one on

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.rows, *self.deepstack)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def sound(self) -> bool:
        """Whether they are numbers. Blocks."""
        return all(bool(mx.isfinite(array).all()) for array in self.arrays)


Encode = Callable[[Any, list[mx.array]], Features]


class Encoding:
    """The graph is built at once and computed in parts, a layer of the tower after the other, so that an image of many
    patches holds up nobody for longer than a layer takes."""

    def __init__(self, picture: Picture, encode: Encode) -> None:
        """`encode`: from what is seen to the features, lazily; it lists what each layer of the tower put out."""
        self.picture = picture
        passed = list[mx.array]()
        self._features = encode(picture.seen, passed)
        self._ahead: list[tuple[mx.array, ...]] = [*((layer,) for layer in passed), self._features.arrays]
        self._stages = len(self._ahead)

    @property
    def remaining(self) -> int:
        """In tokens of its span, 0 only at the end."""
        return self._behind(len(self._ahead))

    def advance(self, tokens: int) -> int:
        """Blocks until so many tokens are computed, as far as layers go into them, but at least a layer. Returns how
        many they were."""
        before = self.remaining
        while self._ahead:
            mx.eval(self._ahead.pop(0))
            if before - self._behind(len(self._ahead) - 1) > tokens:
                break
        return before - self.remaining

    def _behind(self, stages: int) -> int:
        """Tokens, by so many stages that are to come."""
        return -(-self.picture.tokens * stages // self._stages)

    @property
    def features(self) -> Features | None:
        """Once it is through."""
        return None if self._ahead else self._features


def noting(blocks: Iterable[Callable[..., mx.array]], passed: list[mx.array]) -> list[Callable[..., mx.array]]:
    """The same blocks, that list what they put out."""

    def noted(block: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(*given: Any, **named: Any) -> mx.array:
            passed.append(block(*given, **named))
            return passed[-1]

        return call

    return [noted(block) for block in blocks]


class FeatureCache(Recent[Features]):
    """For the engine's thread. How soon an answer comes would tell a tenant what another has shown, so each has a space
    of its own where tenants are kept apart."""

    def forget_unsound(self, space: str, pictures: Iterable[Picture]) -> None:
        """Whatever gave a row no numbers is not given to others."""
        for key in self._kept.keys() & {(space, picture.digest) for picture in pictures}:
            if not self._kept[key].sound:
                self.nbytes -= self._kept.pop(key).nbytes
