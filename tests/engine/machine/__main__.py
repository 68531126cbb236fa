"""Run random sequences of everything that can happen in the engine, and compare each answer with the same request's
alone. They run in rounds: a line for each gives its seed, which repeats the round's events. A sequence that fails is
reduced to a shorter one first, and printed."""

import argparse
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.machine.machine import STEPS, Machine
from tests.engine.machine.test_machine import MACHINES

PROG = "python -m tests.engine.machine"
ROUND = 50  # sequences


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sequences of all chosen families. Raises the first difference."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    parser.add_argument("sequences", nargs="?", type=_positive, default=2000, help="in all; default: 2000")
    parser.add_argument(
        "--family", action="append", choices=MACHINES, help="one family, or several if repeated; default: all"
    )
    parser.add_argument("--seed", type=int, help="of the first round, each later one has the next; default: random")
    parser.add_argument("--no-shrink", action="store_true", help="print a sequence that fails as it is")
    given = parser.parse_args(arguments)
    first_seed = random.randrange(10**6) if given.seed is None else given.seed
    for name, sequences in _shares(given.sequences, given.family or [*MACHINES]):
        _run_family(name, sequences, first_seed, shrink=not given.no_shrink)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of sequences; give at least 1")
    return number


def _keep_log_quiet() -> None:
    """Do not print the engine's log, which has a traceback for each failure on purpose."""
    logger = logging.getLogger("sluice.engine")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())


def _shares(sequences: int, families: list[str]) -> Iterator[tuple[str, int]]:
    """Yield each family with its part of the sequences."""
    each, more = divmod(sequences, len(families))
    for number, name in enumerate(families):
        if share := each + (number < more):
            yield name, share


def _run_family(name: str, sequences: int, first_seed: int, *, shrink: bool) -> None:
    counts = Counter[str]()
    began = time.monotonic()
    for number, done in enumerate(range(0, sequences, ROUND)):
        count = min(ROUND, sequences - done)
        _run_round(name, count, first_seed + number, counts, shrink=shrink)
        seconds = time.monotonic() - began
        print(f"{name}: {done + count} of {sequences}, {seconds:.0f} s, seed {first_seed + number}", flush=True)
    print(f"{name}:", ", ".join(f"{many} {event}" for event, many in sorted(counts.items())), flush=True)


def _run_round(name: str, sequences: int, round_seed: int, counts: Counter[str], *, shrink: bool) -> None:
    how = settings(
        max_examples=sequences,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    try:
        run_state_machine_as_test(seed(round_seed)(_counted(MACHINES[name], counts)), settings=how)
    except BaseException as error:
        error.add_note(f"Run it again: {PROG} {sequences} --family {name} --seed {round_seed}")
        raise


def _counted(machine: type[Machine], counts: Counter[str]) -> type[Machine]:
    """Return the machine with its events counted."""

    def teardown(self: Machine) -> None:
        machine.teardown(self)
        if hasattr(self, "run"):
            counts.update(self.counts())

    return type(machine.__name__, (machine,), {"teardown": teardown})


if __name__ == "__main__":
    _keep_log_quiet()
    main()
