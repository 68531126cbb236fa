"""`python -m sluice.cli`: runs the command from a checkout, without an installed script."""

from sluice.cli import main

main()
