"""Guesses the token where a grammar leaves a choice: the one that was usual where the same tokens were allowed."""

from collections import OrderedDict
from dataclasses import dataclass

_ENTRIES = 1_024
_MEMORY = 0.9  # weight that an observation keeps when the next one is made
_PRIOR_RIGHT, _PRIOR_COMPARED = 0.5, 1.0  # guesses that count before any was made
_REPLACED = 0.4  # share of right guesses below which the newest token becomes the usual one


@dataclass(frozen=True, slots=True)
class Guess:
    """The usual token, and how often it was the right one, recent times counting more."""

    token: int
    right: float = 1.0
    compared: float = 1.0

    @property
    def acceptance(self) -> float:
        """Probability that the token is drawn."""
        return (self.right + _PRIOR_RIGHT) / (self.compared + _PRIOR_COMPARED)

    def after(self, token: int) -> "Guess":
        """Return the guess after a token was drawn in its place."""
        right, compared = self.right * _MEMORY + (token == self.token), self.compared * _MEMORY + 1
        return Guess(self.token if right >= _REPLACED * compared else token, right, compared)


class GuessTable:
    """A table of guesses by the set of tokens that a grammar allows: after a comma, a model mostly writes the same
    white space, and for a property often the same value. The entry that was not observed for the
    longest time is dropped."""

    def __init__(self) -> None:
        self._guesses = OrderedDict[int, Guess]()  # by key

    def lookup(self, key: int) -> Guess | None:
        """Return the guess for a set of allowed tokens, or None if it is new. `key`: its hash."""
        return self._guesses.get(key)

    def observe(self, key: int, token: int) -> None:
        """Record which token was drawn where these were allowed."""
        known = self._guesses.pop(key, None)
        self._guesses[key] = known.after(token) if known else Guess(token)
        if len(self._guesses) > _ENTRIES:
            self._guesses.popitem(last=False)
