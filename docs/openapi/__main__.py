"""`python -m docs.openapi` writes the document of `/openapi.json`; `--check` only checks if it is up to date."""

import argparse
import sys

from docs.openapi.document import FILE, text


def main() -> int:
    """Write or check the file, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.openapi", description="Write the gateway's OpenAPI file.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    if not parser.parse_args().check:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(text(), "utf-8")
    elif not FILE.is_file() or FILE.read_text("utf-8") != text():
        print(f"{FILE.name} is out of date: run python -m docs.openapi", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
