"""The other commands of `sluice`, a module each."""
