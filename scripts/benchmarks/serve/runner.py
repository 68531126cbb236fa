"""Runs the cases on one server after the other."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from scripts.benchmarks.serve import scenarios, workload
from scripts.benchmarks.serve.bare import Bare
from scripts.benchmarks.serve.driver import Send, drive, drive_beside
from scripts.benchmarks.serve.figures import Answer, Figures
from scripts.benchmarks.serve.results import Outcome
from scripts.benchmarks.serve.scenarios import Case, Options
from scripts.benchmarks.serve.servers import Contender, NotServing

_WARM_UP = 2, 4  # chats, tokens each: some parts load with the first request
HIGHEST = "highest"


@dataclass(frozen=True, slots=True)
class Runner:
    """Measures servers of one model. Every server gets the same chats in the same order."""

    options: Options
    scenarios: Sequence[str]
    bare: Bare
    checkpoint: Path
    seed: str
    timeout_s: float
    before: Callable[[str], None]  # is called with a description of what is measured next
    settle_s: float = 0.5  # pause before each case: a server may still tidy up

    def count(self, contender: Contender) -> int:
        """Return the number of outcomes of one run with this server."""
        return sum(1 if each == HIGHEST else len(self._cases(contender, each)) for each in self.scenarios)

    def _cases(self, contender: Contender, scenario: str) -> list[Case]:
        cases = scenarios.cases(scenario, self.options, self.bare)
        return [case for case in cases if contender.ours or not case.ours]

    async def run(self, contenders: Sequence[Contender], runs: int) -> AsyncIterator[Outcome]:
        """Yield the outcomes. Each run starts each server anew, alone; every other run in the opposite order.

        Raises NotServing.
        """
        for number in range(runs):
            for contender in contenders[:: 1 if number % 2 == 0 else -1]:
                self.before(f"run {number + 1}: {contender.name} starts")
                # Starting and stopping block the loop, which has nothing else to do then.
                with contender.serve(self.checkpoint) as connect:
                    for scenario in self.scenarios:
                        async with connect(scenario in scenarios.OVER_HTTP) as send:
                            await self._warm_up(contender.name, send, number, scenario)
                            async for outcome in self._scenario(contender, send, number, scenario):
                                yield outcome

    async def _warm_up(self, name: str, send: Send, run: int, scenario: str) -> None:
        chats = workload.burst(*_WARM_UP, self._dice(run, f"warm-up {scenario}"))
        answers = await drive(send, chats, timeout_s=self.timeout_s)
        if error := _error(answers):
            raise NotServing(f"{name}: refuses a first chat: {error}")

    async def _scenario(self, contender: Contender, send: Send, run: int, scenario: str) -> AsyncIterator[Outcome]:
        if scenario == HIGHEST:
            yield await self._highest(contender.name, send, run)
        for case in self._cases(contender, scenario):
            yield await self._case(contender.name, send, run, case)

    async def _highest(self, name: str, send: Send, run: int) -> Outcome:
        """Search the highest rate; without one, return the outcome of the lowest tried, with a rate of 0."""
        tried = dict[float, Outcome]()
        while load := scenarios.next_load({load: each.figures.good for load, each in tried.items()}):
            case = scenarios.highest_case(self.options, self.bare, load)
            tried[load] = await self._case(name, send, run, case)
        best = scenarios.best_load({load: each.figures.good for load, each in tried.items()})
        found = tried[best or min(tried)]
        rate = found.rate if best else 0.0
        return Outcome(name, HIGHEST, HIGHEST, found.figures, rate, best or 0.0, found.error)

    async def _case(self, name: str, send: Send, run: int, case: Case) -> Outcome:
        self.before(f"run {run + 1}: {name}, {case.scenario}, {case.name}")
        dice = self._dice(run, f"{case.scenario} {case.name}")
        seen = workload.at_once(case.seen, 1)
        await drive(send, seen, timeout_s=self.timeout_s, one_by_one=True)
        await asyncio.sleep(self.settle_s)
        answers, offline = await self._answers(send, case, dice)
        if not any(answer.arrivals for answer in answers):
            raise NotServing(f"{name}: answered none of {len(answers)} turns: {_error(answers)}")
        figures = Figures.of(
            answers,
            bare_s=self.bare.answers_s([*answers, *offline], case.rows),
            alone_s=self.bare.alone_s,
            offline=offline,
        )
        return Outcome(name, case.scenario, case.name, figures, case.rate, case.load, _error(answers))

    async def _answers(self, send: Send, case: Case, dice: Random) -> tuple[list[Answer], list[Answer]]:
        chats = case.chats(dice)
        if not case.offline:
            return await drive(send, chats, timeout_s=self.timeout_s, one_by_one=case.one_by_one), []
        beside = workload.offline(dice)
        return await drive_beside(send, chats, beside, case.offline, timeout_s=self.timeout_s)

    def _dice(self, run: int, name: str) -> Random:
        return Random(f"{self.seed}, {run}, {name}")


def _error(answers: Sequence[Answer]) -> str | None:
    return next((answer.error for answer in answers if answer.error), None)
