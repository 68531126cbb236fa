"""The commands of `sluice batch`."""
