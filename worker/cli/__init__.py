"""Commands of the worker's distribution. `sluice` finds them by their entry points, in pyproject.toml."""
