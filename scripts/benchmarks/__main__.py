"""scripts/bench NAME [options]: runs one benchmark."""

import argparse
import os
import signal
import sys
from collections.abc import Callable

from rich.console import Console

from scripts.benchmarks import batch, engine, prefix, quality, sampling, specprefill, spine, start, vision
from scripts.benchmarks.disk import command as disk
from scripts.benchmarks.front import command as front
from scripts.benchmarks.serve import command, options
from scripts.benchmarks.speculation import command as speculation_command
from scripts.benchmarks.speculation import options as speculation_options

BENCHMARKS: dict[str, tuple[Callable[[Console], bool], str]] = {
    "spine": (spine.main, "cost of the path through Redis"),
    "start": (start.main, "time from a worker's start to its first answer, against the import of mlx-lm"),
    "engine": (engine.main, "continuous batching against mlx-lm's"),
    "prefix": (prefix.main, "cost of a prefix cache hit, and its length by family; --disk: loads from disk"),
    "batch": (batch.main, "offline runs against mlx-lm's batch_generate, and the effect of sorting lines"),
    "specprefill": (specprefill.main, "SpecPrefill: time saved, and its cost for running rows"),
    "specprefill-quality": (quality.main, "SpecPrefill: its effect on answers"),
    "vision": (vision.main, "images and text in one batch against one by one, and their cost for running rows"),
}


def main() -> int:
    """Run the named benchmark, and return 0 if every value is within its limit."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Run a benchmark, and compare its values with their limits."
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (_, label) in BENCHMARKS.items():
        one = names.add_parser(name, help=label, description=label)
        if name == "prefix":
            disk.add_options(one)
    options.add_options(names.add_parser("serve", help=options.SUMMARY))
    front.add_options(names.add_parser("gateway", help=front.SUMMARY))
    sampling.add_options(names.add_parser("sampling", help="cost of sampling, and of a step on the host"))
    speculation_options.add_options(names.add_parser("speculation", help=speculation_options.SUMMARY))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers of a benchmark are stopped too
    console = Console(width=110)
    blas = os.environ.get("LD_PRELOAD", "")
    console.print(
        f"[dim]{os.cpu_count()} cores, BLAS: {'OpenBLAS, preloaded' if 'blas' in blas else 'the one linked by mlx'}[/]"
    )
    return 0 if _passed(given, console) else 1


def _passed(given: argparse.Namespace, console: Console) -> bool:
    match given.name:
        case "serve":
            return command.main(given)
        case "gateway":
            return front.main(console, given)
        case "sampling":
            return sampling.main(console, given)
        case "speculation":
            return speculation_command.main(given)
        case "prefix" if given.disk:
            return disk.main(console, given)
    return BENCHMARKS[given.name][0](console)


if __name__ == "__main__":
    sys.exit(main())
