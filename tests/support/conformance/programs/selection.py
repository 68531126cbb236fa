"""Which programs and checks a run has."""

import shutil

from tests.support.conformance.programs.checks import CHECKS, QUICK
from tests.support.conformance.programs.programs import PROGRAMS

_ALL = "all"
_USUAL = ("codex", "claude-code", "opencode", "ai-sdk", "aider", "llm")  # of a run without arguments


class Unknown(Exception):
    """There is no such program, or no such check; the message lists those that there are."""


def select(programs: str | None, checks: str | None) -> tuple[list[str], list[str]]:
    """Return the names of the programs and of the checks that the options choose. Without any: the usual programs that
    this machine can install, and the quick checks. Raises `Unknown`."""
    if programs is None:
        return _usual(), _checks(checks, QUICK)
    names = list(PROGRAMS) if programs == _ALL else _listed("programs", programs)
    return names, _checks(checks, tuple(CHECKS))


def _checks(given: str | None, otherwise: tuple[str, ...]) -> list[str]:
    return list(otherwise) if given is None else _listed("checks", given)


def _usual() -> list[str]:
    has_npm = shutil.which("npm") is not None
    return [name for name in _USUAL if has_npm or PROGRAMS[name].python]


def _listed(option: str, given: str) -> list[str]:
    known = PROGRAMS if option == "programs" else CHECKS
    names = list(dict.fromkeys(name.strip() for name in given.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise Unknown(f"--{option}: there is no {unknown[0]!r}; choose from {', '.join(known)}")
    return names
