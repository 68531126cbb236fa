"""The environment variables of the settings: their names, and unknown ones.

The environment is read only here and by pydantic, for `worker.settings`.
"""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from dotenv import dotenv_values
from pydantic_settings import BaseSettings, DotEnvSettingsSource, EnvSettingsSource

from sluice.wording import unknown_setting
from worker.errors import CannotStart

PREFIX = "SLUICE_"
_OF_END = {f"SLUICE_BATCH_{name}" for name in ("ID", "STATUS", "OUTPUT", "ERRORS")}  # for --on-end of `batch run`
_NOT_OURS = {"SLUICE_TEST_REDIS_URL", "SLUICE_URL", "SLUICE_API_KEY", *_OF_END}  # of the tests and clients
_SERVE_PREFIX = "SLUICE_SERVE_"  # of `sluice serve`, which checks its own names


def variable(field: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + field.upper()


def unique_worker_name() -> str:
    """Return a name that no other worker of the same server has: the host's name and the process id."""
    return f"{socket.gethostname()}-{os.getpid()}"


def read_unchecked(settings: type[BaseSettings]) -> dict[str, str]:
    """Return the settings that the environment and `.env` hold, by field, as they are written there: for a command that
    needs few of them, and works whatever the others are."""
    written = {
        **DotEnvSettingsSource(settings)(),
        **EnvSettingsSource(settings)(),
    }  # the environment overrides the file
    return {field: str(value) for field, value in written.items() if value}


def child_environment(redis_url: str, redis_urls: str | None) -> dict[str, str]:
    """Return the environment of a child process. The URL is passed in it, since command lines are public."""
    inherited = {name: value for name, value in os.environ.items() if name != "SLUICE_URL"}  # of another kind of server
    return {**inherited, variable("redis_url"): redis_url, variable("redis_urls"): redis_urls or ""}


def opentelemetry_variables(settings: type[BaseSettings]) -> dict[str, str]:
    """Return the variables of OpenTelemetry that `.env` holds."""
    values = dotenv_values(str(settings.model_config["env_file"]))
    return {name: value for name, value in values.items() if name.startswith("OTEL_") and value is not None}


def refuse_unknown(fields: Iterable[str], env_file: Path) -> None:
    """Refuse variables that belong to no field, since a misspelt setting would be ignored silently. `env_file` may be
    missing. Raises `CannotStart`."""
    known = {variable(field) for field in fields}
    for name in sorted(_set_names(env_file) - known - _NOT_OURS):
        raise CannotStart(unknown_setting(name, known))


def _set_names(env_file: Path) -> set[str]:
    names = {name.upper() for name in os.environ}
    if env_file.is_file():
        names |= {name.upper() for name in dotenv_values(env_file)}
    return {name for name in names if name.startswith(PREFIX) and not name.startswith(_SERVE_PREFIX)}
