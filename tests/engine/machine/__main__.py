"""Run the machine with many sequences of rules: python -m tests.engine.machine [SEQUENCES [FAMILY ...]]

Prints what happened in them. A sequence that fails is reduced to a shorter one first, and printed."""

import logging
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.machine.machine import STEPS, Machine
from tests.engine.machine.test_machine import MACHINES


def counted(machine: type[Machine], counts: Counter[str]) -> type[Machine]:
    def teardown(self: Machine) -> None:
        machine.teardown(self)
        counts.update(self.counts())

    return type(machine.__name__, (machine,), {"teardown": teardown})


def main(sequences: int, families: list[str]) -> None:
    logging.disable(logging.CRITICAL)  # the engine logs each failure that is made on purpose
    names = families or [*MACHINES]
    for name in names:
        counts, began = Counter[str](), time.perf_counter()
        how = settings(
            max_examples=-(-sequences // len(names)),
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=[*HealthCheck],
        )
        run_state_machine_as_test(counted(MACHINES[name], counts), settings=how)
        print(f"{name}: {time.perf_counter() - began:.0f} s", dict(sorted(counts.items())), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 2000, sys.argv[2:])
