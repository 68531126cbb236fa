"""`python -m sluice`: the command, where it is not installed."""

from sluice.cli import main

main()
