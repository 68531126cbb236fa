"""The command `sluice`. It needs typer and rich, which a backend that imports `sluice` does not."""

import sys
from importlib.util import find_spec


def main() -> None:
    if any(find_spec(name) is None for name in ("typer", "rich")):
        print("sluice: the command needs its extra: pip install 'mlx-sluice[cli]'", file=sys.stderr)
        sys.exit(2)
    from sluice.cli.app import run

    run()
