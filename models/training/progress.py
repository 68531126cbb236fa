"""Prints the progress of a run: one line that is rewritten on a terminal, otherwise a line every fifty steps."""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from models.training.plan import Plan
from models.training.train import Step

SHOWN_EVERY = 50  # steps, if the output is not a terminal


class Progress:
    """Call it with each step as it ends. Shows the rate of this process, and the mean loss of its last fifty steps."""

    def __init__(
        self, plan: Plan, done: int, out: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps = plan.steps
        self._tokens, self._tokens_left = 0, plan.tokens_from(done)
        self._losses: deque[float] = deque(maxlen=SHOWN_EVERY)
        self._out, self._clock = out, clock
        self._began = clock()

    def __call__(self, step: Step) -> None:
        self._tokens += step.tokens
        self._tokens_left -= step.tokens
        self._losses.append(step.loss)
        last = step.index + 1 == self._steps
        if self._out.isatty():
            self._out.write(f"\r{self._line(step)}\x1b[K" + "\n" * last)
        elif last or (step.index + 1) % SHOWN_EVERY == 0:
            self._out.write(self._line(step) + "\n")
        self._out.flush()

    def _line(self, step: Step) -> str:
        rate = self._tokens / (self._clock() - self._began)
        loss = sum(self._losses) / len(self._losses)
        return (
            f"step {step.index + 1}/{self._steps}  rows of {step.length}  loss {loss:.3f}  "
            f"{rate:,.0f} tokens/s  {_duration(self._tokens_left / rate)} left"
        )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
