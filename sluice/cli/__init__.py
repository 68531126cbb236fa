"""The command `sluice`. It needs typer and rich, unlike the client library."""

import sys
from importlib.util import find_spec

from sluice import __version__


def main() -> None:
    """Run the command."""
    if any(find_spec(name) is None for name in ("typer", "rich")):
        if sys.argv[1:] == ["--version"]:
            print(f"sluice {__version__}")
            return
        print("sluice: the command needs typer and rich: pip install 'typer>=0.20' 'rich>=13'", file=sys.stderr)
        sys.exit(2)
    from sluice.cli.app import run

    run()
