"""The order in which waiting prompts advance."""

from collections.abc import Callable, Iterable
from math import inf

from worker.schedule.step.prompt import PromptState

# A first token within this time counts as good. A prompt that can no longer have one counts as taking this multiple of
# its time: overload then does not make every prompt late, and a late but short one is not the last of all.
FIRST_TOKEN_S = 2.0
LATE_FACTOR = 8
# One step in this many is for the prompts that have waited longest, so a late or long one advances under any load.
OLDEST_FIRST_EVERY = 8
# Each second that a prompt has waited counts as this much less of its own time: it lets shorter ones pass until it has
# waited for eight times the difference (of its time counted `LATE_FACTOR` times, once it is late).
AGING = 1 / 8

# Orders the prompts that wait. The second argument is the number of the step, counting up.
Order = Callable[[Iterable[PromptState], int], list[PromptState]]


def in_order(waiting: Iterable[PromptState], step: int) -> list[PromptState]:
    """Return the prompts, the first to advance first: interactive ones, of these the ones that take the least time,
    less a part of the time that they have waited. The time of a prompt that can no longer have its first token within
    `FIRST_TOKEN_S` counts `LATE_FACTOR` times. One step in `OLDEST_FIRST_EVERY` begins with the oldest instead. `step`:
    number of the step, counting up."""
    return sorted(waiting, key=_age if step % OLDEST_FIRST_EVERY == 0 else _rank)


def _age(row: PromptState) -> tuple[bool, float]:
    return row.lane == "batch", -row.waited_s


def _rank(row: PromptState) -> tuple[bool, float]:
    offline = row.lane == "batch"
    if row.only_joins:
        return offline, -inf
    late = not offline and row.waited_s + row.alone_s > FIRST_TOKEN_S
    return offline, (LATE_FACTOR if late else 1) * row.alone_s - AGING * row.waited_s
