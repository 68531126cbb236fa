"""A few sequences of the machine for each family; `python -m tests.engine.machine` runs any number of them."""

from hypothesis import HealthCheck, settings

from tests.engine.machine.families import Family
from tests.engine.machine.machine import STEPS, Machine
from tests.selection import examples


class PlainMachine(Machine):
    family = Family("qwen3")


class WindowMachine(Machine):
    family = Family("gemma3")


class RecurrentMachine(Machine):
    family = Family("qwen3_5")


class TwofoldMachine(Machine):
    """Recurrent state and keys within one layer."""

    family = Family("falcon_h1")


class SteppingMachine(Machine):
    """Recurrent state that advances token by token while drafts are verified."""

    family = Family("jamba")


class SeeingRecurrentMachine(Machine):
    family = Family("qwen3_5", sees=True)


class SeeingWindowMachine(Machine):
    family = Family("gemma4 with experts", sees=True)


MACHINES: dict[str, type[Machine]] = {
    "plain": PlainMachine,
    "window": WindowMachine,
    "recurrent": RecurrentMachine,
    "twofold": TwofoldMachine,
    "stepping": SteppingMachine,
    "recurrent-vision": SeeingRecurrentMachine,
    "window-vision": SeeingWindowMachine,
}

TestPlain = PlainMachine.TestCase
TestWindow = WindowMachine.TestCase
TestRecurrent = RecurrentMachine.TestCase
TestTwofold = TwofoldMachine.TestCase
TestStepping = SteppingMachine.TestCase
TestSeeingRecurrent = SeeingRecurrentMachine.TestCase
TestSeeingWindow = SeeingWindowMachine.TestCase
for case in TestPlain, TestWindow, TestRecurrent, TestTwofold, TestStepping, TestSeeingRecurrent, TestSeeingWindow:
    case.settings = settings(
        max_examples=examples(8, by_default=2),
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
del case  # pytest would run it once more
