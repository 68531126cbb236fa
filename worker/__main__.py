"""`python -m worker`: serve one model, with settings from the environment and `.env`."""

import sys

from worker.app import run_worker
from worker.errors import CannotStart
from worker.process.daemon import EXIT_CANNOT_START
from worker.settings import read_settings

USAGE = """python -m worker takes no arguments: settings come from the environment and .env, and .env.example
lists them. `sluice worker --help` shows the few that can be given on the command line."""


def main() -> None:
    """Run the worker until it is stopped. Exits with a code and a message if it cannot start."""
    if len(sys.argv) > 1:
        asked = sys.argv[1] in ("-h", "--help")
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else EXIT_CANNOT_START)
    try:
        settings = read_settings()
        if settings.idle_unload_s is not None:
            raise CannotStart(
                "SLUICE_IDLE_UNLOAD_S: python -m worker holds its model until it ends; start sluice worker, which "
                "unloads it, or leave the setting out."
            )
        run_worker(settings)
    except CannotStart as error:
        print(f"sluice worker: {error}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)


if __name__ == "__main__":
    main()
