"""Sessions of several kinds. A session waits for its answer, and asks again a while after it."""

import math
from collections.abc import Callable
from random import Random
from typing import Protocol

from scripts.simulation.fleet.worker import Path, Texts, Then


class Clock(Protocol):
    """The part of a run that sessions use."""

    now_s: float

    def at(self, time_s: float, call: Then) -> None:
        """Call this at that time."""

    def submit(self, session: int, path: Path, answer: int, then: Then | None) -> None:
        """Queue a prompt; `then` is called when its answer has ended."""


Session = Callable[[Clock, int, Random], None]  # begins a session, by its number


def _lognormal(dice: Random, median: float, sigma: float, least: float, most: float) -> float:
    return min(most, max(least, dice.lognormvariate(math.log(median), sigma)))


def _chats(texts: Texts) -> Session:
    """Chats under four system prompts: short messages, some with a pasted text, most of few turns."""
    systems = [texts.after((), tokens) for tokens in (350, 900, 1800, 3500)]

    def turn(clock: Clock, session: int, dice: Random, path: Path, turns: int) -> None:
        pasted = dice.random() < 0.06
        said = _lognormal(dice, 2500, 0.7, 500, 12_000) if pasted else _lognormal(dice, 70, 1.0, 8, 1500)
        asked, answer = texts.after(path, said), int(_lognormal(dice, 280, 0.8, 10, 1500))

        def then() -> None:
            after = texts.after(asked, answer)
            if turns > 1 and texts.length(after) < 60_000:
                think_s = _lognormal(dice, 18, 1.1, 1, 900)
                clock.at(clock.now_s + think_s, lambda: turn(clock, session, dice, after, turns - 1))

        clock.submit(session, asked, answer, then)

    def begin(clock: Clock, session: int, dice: Random) -> None:
        system = dice.choices(systems, (4, 3, 2, 1))[0]
        turn(clock, session, dice, system, min(80, int(dice.paretovariate(1.1) * 2)))

    return begin


def _agents(texts: Texts) -> Session:
    """Agents in forty repositories under three long system prompts: many turns, each soon after the last, and one in
    ten of them asks three to eight others at once."""
    systems = [texts.after((), tokens) for tokens in (10_000, 14_000, 20_000)]
    repositories = [texts.after(systems[number % 3], 3000 + 450 * number) for number in range(40)]

    def turn(clock: Clock, session: int, dice: Random, path: Path, turns: int) -> None:
        at_once = dice.randint(3, 8) if dice.random() < 0.10 else 1
        ends = list[Path]()

        def ended(end: Path) -> None:
            ends.append(end)
            if len(ends) == at_once and turns > 1 and texts.length(ends[0]) < 110_000:
                base = ends[0] if at_once == 1 else path
                after = texts.after(base, _lognormal(dice, 600, 1.1, 30, 12_000))
                pause_s = _lognormal(dice, 2.5, 1.0, 0.2, 120)
                clock.at(clock.now_s + pause_s, lambda: turn(clock, session, dice, after, turns - 1))

        def ask(asked: Path) -> None:
            answer = int(_lognormal(dice, 110, 0.8, 10, 1200))
            clock.submit(session, asked, answer, lambda: ended(texts.after(asked, answer)))

        for _ in range(at_once):
            ask(path if at_once == 1 else texts.after(path, _lognormal(dice, 300, 0.8, 30, 4000)))

    def begin(clock: Clock, session: int, dice: Random) -> None:
        path = repositories[min(39, int(dice.expovariate(1 / 9)))]
        path = texts.after(path, _lognormal(dice, 1500, 0.8, 100, 12_000))
        turn(clock, session, dice, path, int(_lognormal(dice, 18, 0.7, 3, 80)))

    return begin


def _rag(texts: Texts) -> Session:
    """Questions about one of four hundred documents, a few of which many ask for."""
    dice_of_documents, system = Random(7), texts.after((), 600)
    documents = [texts.after(system, _lognormal(dice_of_documents, 5000, 0.6, 800, 24_000)) for _ in range(400)]
    weights = [1 / (number + 1) ** 0.9 for number in range(400)]

    def begin(clock: Clock, session: int, dice: Random) -> None:
        path = texts.after(dice.choices(documents, weights)[0], _lognormal(dice, 70, 0.8, 8, 1500))
        clock.submit(session, path, int(_lognormal(dice, 180, 0.7, 10, 1000)), None)

    return begin


def _none(texts: Texts) -> Session:
    """Prompts that have nothing in common."""

    def begin(clock: Clock, session: int, dice: Random) -> None:
        path = texts.after((), _lognormal(dice, 1300, 1.0, 50, 24_000))
        clock.submit(session, path, int(_lognormal(dice, 280, 0.8, 10, 1500)), None)

    return begin


def _huge(texts: Texts) -> Session:
    """Prompts that all begin with the same 20,000 tokens."""
    system = texts.after((), 20_000)

    def begin(clock: Clock, session: int, dice: Random) -> None:
        path = texts.after(system, _lognormal(dice, 150, 0.9, 8, 3000))
        clock.submit(session, path, int(_lognormal(dice, 200, 0.7, 10, 1000)), None)

    return begin


# The sessions of each workload, and how many begin in a second for each worker: workers are busy, but not overloaded
# if their caches are used; `none` and `huge` with 4 rows are.
WORKLOADS: dict[str, tuple[tuple[Callable[[Texts], Session], float], ...]] = {
    "chat": ((_chats, 0.136),),
    "agents": ((_agents, 0.0126),),
    "rag": ((_rag, 0.527),),
    "none": ((_none, 0.38),),
    "huge": ((_huge, 1.05),),
    "mixed": ((_chats, 0.034), (_agents, 0.003675), (_rag, 0.155)),
}


def begin(workload: str, clock: Clock, texts: Texts, dice: Random, workers: float, until_s: float) -> None:
    """Draw all beginnings in advance, so that all policies meet the same sessions."""
    session = 0
    for make, per_worker in WORKLOADS[workload]:
        start, time_s = make(texts), 0.0
        while (time_s := time_s + dice.expovariate(per_worker * workers)) < until_s:
            seed = dice.getrandbits(48)

            def call(start: Session = start, number: int = session, seed: int = seed) -> None:
                start(clock, number, Random(seed))

            clock.at(time_s, call)
            session += 1
