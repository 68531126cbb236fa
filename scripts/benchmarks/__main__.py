"""scripts/bench NAME [options]"""

import argparse
import os
import sys
from collections.abc import Callable

from rich.console import Console

from scripts.benchmarks import batch, engine, prefix, quality, sampling, specprefill, spine, vision

BENCHMARKS: dict[str, Callable[[Console], bool]] = {
    "spine": spine.main,
    "sampling": sampling.main,
    "engine": engine.main,
    "prefix": prefix.main,
    "batch": batch.main,
    "specprefill": specprefill.main,
    "specprefill-quality": quality.main,
    "vision": vision.main,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Measure, and compare with the bars that we hold."
    )
    parser.add_argument(
        "name",
        choices=BENCHMARKS,
        help="spine: what the way through Redis costs; sampling: what drawing tokens costs; "
        "engine: continuous batches against mlx-lm's own; "
        "prefix: what a hit in the prefix cache costs, and how far it reaches; "
        "batch: offline runs against mlx-lm's batch_generate, and what sorting saves; "
        "specprefill: what thinning prompts saves, and what it costs those who decode; "
        "specprefill-quality: what thinning prompts costs in answers; "
        "vision: images and text together against one by one, and what images cost those who decode",
    )
    name = parser.parse_args().name
    console = Console(width=110)
    blas = os.environ.get("LD_PRELOAD", "")
    console.print(
        f"[dim]{os.cpu_count()} cores, BLAS: {'OpenBLAS, preloaded' if 'blas' in blas else 'as mlx brings it'}[/]"
    )
    return 0 if BENCHMARKS[name](console) else 1


if __name__ == "__main__":
    sys.exit(main())
