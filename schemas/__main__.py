"""`python -m schemas` writes docs/contract.schema.json; `--check` only checks if it is up to date."""

import argparse
import sys
from pathlib import Path

from schemas import generate

FILE = Path(__file__).parent.parent / "docs" / "contract.schema.json"


def main() -> int:
    """Write or check the file, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m schemas", description="Write the contract's JSON Schema.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    if not parser.parse_args().check:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(generate.contract_text(), "utf-8")
    elif not FILE.is_file() or FILE.read_text("utf-8") != generate.contract_text():
        print(f"{FILE.name} is out of date: run python -m schemas", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
