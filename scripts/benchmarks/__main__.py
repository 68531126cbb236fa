"""scripts/bench NAME [options]"""

import argparse
import os
import sys
from collections.abc import Callable

from rich.console import Console

from scripts.benchmarks import batch, burst, engine, prefix, quality, sampling, specprefill, spine, vision

BENCHMARKS: dict[str, tuple[Callable[[Console], bool], str]] = {
    "spine": (spine.main, "what the way through Redis costs"),
    "sampling": (sampling.main, "what drawing tokens costs"),
    "engine": (engine.main, "continuous batches against mlx-lm's own"),
    "prefix": (prefix.main, "what a hit in the prefix cache costs, and how far it reaches"),
    "batch": (batch.main, "offline runs against mlx-lm's batch_generate, and what sorting saves"),
    "specprefill": (specprefill.main, "what thinning prompts saves, and what it costs those who decode"),
    "specprefill-quality": (quality.main, "what thinning prompts costs in answers"),
    "vision": (vision.main, "images and text together against one by one, and what images cost those who decode"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Measure, and compare with the bars that we hold."
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (_, what) in BENCHMARKS.items():
        names.add_parser(name, help=what, description=what)
    burst.add_options(names.add_parser("burst", help=burst.SUMMARY, description=burst.SUMMARY))
    options = parser.parse_args()
    console = Console(width=110)
    blas = os.environ.get("LD_PRELOAD", "")
    console.print(
        f"[dim]{os.cpu_count()} cores, BLAS: {'OpenBLAS, preloaded' if 'blas' in blas else 'as mlx brings it'}[/]"
    )
    passed = burst.main(console, options) if options.name == "burst" else BENCHMARKS[options.name][0](console)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
