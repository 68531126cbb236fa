"""scripts/bench NAME [options]: runs one benchmark."""

import argparse
import os
import signal
import sys

from rich.console import Console

from scripts.benchmarks import engine, fleet, sampling, spine
from scripts.benchmarks.capacity import command as capacity
from scripts.benchmarks.serve import command as serve
from scripts.benchmarks.serve import options as serve_options
from scripts.benchmarks.speculation import command as speculation


def main() -> int:
    """Run the named benchmark, and return 0 if every value is within its limit."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Run a benchmark, and compare its values with their limits."
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    names.add_parser("spine", help="cost of the path through Redis")
    engine.add_options(names.add_parser("engine", help="continuous batching against mlx-lm's, and its own limits"))
    serve_options.add_options(names.add_parser("serve", help=serve_options.SUMMARY))
    sampling.add_options(names.add_parser("sampling", help="cost of sampling, and of a step on the host"))
    speculation.add_options(names.add_parser("speculation", help=speculation.SUMMARY))
    capacity.add_options(names.add_parser("capacity", help=capacity.SUMMARY))
    fleet.add_options(names.add_parser("fleet", help=fleet.SUMMARY))
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
        case "spine":
            return spine.main(console)
        case "engine":
            return engine.main(console, given.parts)
        case "sampling":
            return sampling.main(console, given)
        case "speculation":
            return speculation.main(given)
        case "capacity":
            return capacity.main(Console(width=170), given)
        case "fleet":
            return fleet.main(Console(width=120), given)
    return serve.main(given)


if __name__ == "__main__":
    sys.exit(main())
