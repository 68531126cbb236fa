"""`python -m worker`: serve one model, with settings from the environment and `.env`."""

import sys

from worker.app import EXIT_CANNOT_START, run
from worker.errors import CannotStart
from worker.settings import read_settings


def main() -> None:
    try:
        run(read_settings())
    except CannotStart as error:
        print(f"sluice worker: {error}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)


if __name__ == "__main__":
    main()
