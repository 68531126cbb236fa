"""Learns which token is usual where a grammar leaves a choice."""

from collections import OrderedDict
from dataclasses import dataclass

_PLACES = 1_024
_MEMORY = 0.9  # weight that an observation keeps when the next one is made
_PRIOR_RIGHT, _PRIOR_COMPARED = 0.5, 1.0  # guesses that count before any was made
_REPLACED = 0.4  # share of right guesses below which the newest token becomes the usual one


@dataclass(frozen=True, slots=True)
class Habit:
    """The usual token at a place, and how often guesses were right there, recent ones counting more."""

    token: int
    right: float = 1.0
    compared: float = 1.0

    @property
    def chance(self) -> float:
        """Probability that the token is drawn."""
        return (self.right + _PRIOR_RIGHT) / (self.compared + _PRIOR_COMPARED)

    def after(self, token: int) -> "Habit":
        """Return the habit after a token was drawn at its place."""
        right, compared = self.right * _MEMORY + (token == self.token), self.compared * _MEMORY + 1
        return Habit(self.token if right >= _REPLACED * compared else token, right, compared)


class Habits:
    """The usual token at each place of constrained answers: after a comma, a model mostly writes the same white space,
    and for a property often the same value. A place is identified by the tokens that the grammar allows there. The one
    that was not seen for the longest time is forgotten."""

    def __init__(self) -> None:
        self._habits = OrderedDict[int, Habit]()  # by place

    def guess(self, place: int) -> Habit | None:
        """Return the habit at a place, or None if the place is new."""
        return self._habits.get(place)

    def observe(self, place: int, token: int) -> None:
        """Record which token was drawn at a place."""
        known = self._habits.pop(place, None)
        self._habits[place] = known.after(token) if known else Habit(token)
        if len(self._habits) > _PLACES:
            self._habits.popitem(last=False)
