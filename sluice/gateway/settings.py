"""The settings of `sluice serve`: variables `SLUICE_SERVE_...`, from the environment and `.env`."""

import os
import re
from pathlib import Path
from typing import Self

from dotenv import dotenv_values
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from sluice.contract.keys import MODEL_NAME
from sluice.contract.redis_url import MapFile
from sluice.gateway.protection import is_loopback
from sluice.log_lines import LogFormat
from sluice.wording import unknown_setting, value_problem

PREFIX = "SLUICE_SERVE_"
REDIS_URL, REDIS_URLS = "SLUICE_REDIS_URL", "SLUICE_REDIS_URLS"  # shared with the workers
_LOG_FORMAT = "SLUICE_LOG_FORMAT"  # likewise
ENV_FILE = Path(".env")
_NEEDS_KEYS = (
    "without keys the gateway listens on a loopback address only; make a key with `sluice keys create` "
    "and set SLUICE_SERVE_KEYS"
)


class CannotServe(Exception):
    """Ends `sluice serve` before its first request, with a message for the operator."""


class ServeSettings(BaseSettings):
    """The settings of a gateway. Each is read from the variable `SLUICE_SERVE_` + its name in capitals."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=ENV_FILE,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on. Without keys, a loopback address.")
    port: int = Field(8000, ge=0, le=65_535, description="Port to listen on; 0 takes any free one.")
    models: str | None = Field(
        None,
        description="Names that requests may use for served models, such as gpt-4o-mini=default,claude-*=big. "
        "Default: only the served names themselves.",
    )
    no_worker_s: float = Field(
        10.0, ge=0, description="Seconds that a request waits for a worker of its model before it is refused with 503."
    )
    heartbeat_s: float = Field(
        15.0, gt=0, description="Seconds of silence in a stream after which a sign of life keeps its connection open."
    )
    disconnect_grace_s: float = Field(
        3.0,
        ge=0,
        description="Seconds that a job continues after its client has left. The same request, sent again meanwhile,"
        " returns to it.",
    )
    max_body_bytes: int = Field(
        16_000_000,
        ge=1_000,
        description="Maximum size of a request's body, in bytes.",
    )
    max_held_bytes: int = Field(
        default_factory=lambda given: max(256_000_000, given.get("max_body_bytes", 0)),
        ge=1_000,
        examples=["256000000"],
        description="Maximum bytes of bodies and stored answers that each process holds at once; a key may hold a "
        "quarter. Default: 256000000, or one body of the maximum size if that is more.",
    )
    response_ttl_s: int = Field(
        86_400,
        ge=60,
        description="Seconds that /v1/responses keeps a response after its last use.",
    )
    strict: bool = Field(
        False,
        description="Refuse every field and part of a request that is not supported, also in the history.",
    )
    keys: Path | None = Field(
        None,
        description="File of the API keys; `sluice keys` edits it. Default: every request is accepted, and the gateway "
        "answers to its own machine only.",
    )
    batch_dir: Path | None = Field(
        None,
        description="Folder of offline runs, the SLUICE_BATCH_DIR of the workers, for /v1/files and /v1/batches. "
        "Default: none, and these are answered with 404.",
    )
    max_connections_per_key: int = Field(
        1_000,
        ge=1,
        description="Requests of one key that each process answers at once.",
    )
    client_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds that a client may take to send its headers or body, and to go on reading its answer.",
    )
    cors_origins: str | None = Field(
        None,
        description="Web sites whose pages may call the gateway from a browser, such as "
        "https://a.example,https://b.example; * is any. Default: none.",
    )
    webhooks: bool = Field(
        True, description="Deliver webhooks. Off where the network allows no requests to their endpoints."
    )
    drain_s: float = Field(30.0, ge=0, description="Seconds that open responses may take after SIGTERM.")

    @field_validator("max_held_bytes")
    @classmethod
    def _holds_a_body(cls, held: int, info: ValidationInfo) -> int:
        if held < info.data.get("max_body_bytes", 0):
            raise ValueError("it must be at least SLUICE_SERVE_MAX_BODY_BYTES")
        return held

    @field_validator("batch_dir")
    @classmethod
    def _is_a_folder(cls, folder: Path | None) -> Path | None:
        if folder is not None and not os.path.isdir(folder):  # `is_dir` raises for a name that is too long
            raise ValueError(f"there is no folder {str(folder)!r}; give that of the workers, or make it first")
        return folder

    @field_validator("models")
    @classmethod
    def _names_served_models(cls, models: str | None) -> str | None:
        seen = set[str]()
        for pair in models.split(",") if models else ():
            requested, _, served = pair.partition("=")
            if not requested or requested != requested.strip() or not re.fullmatch(MODEL_NAME, served):
                raise ValueError(f"{pair!r} must look like gpt-4o-mini=default")
            if "*" in requested[:-1]:
                raise ValueError(f"{pair!r} has a * before the end of the name; write it last, as in claude-*=default")
            if requested in seen:
                raise ValueError(f"{requested!r} is mapped twice; leave one of the pairs out")
            seen.add(requested)
        return models

    @field_validator("cors_origins")
    @classmethod
    def _names_sites(cls, origins: str | None) -> str | None:
        for origin in origins.split(",") if origins is not None else ():
            if not re.fullmatch(r"\*|https?://[^/\s?#*]+", origin):
                raise ValueError(f"{origin!r} must look like https://a.example, without a path")
        return origins

    @model_validator(mode="after")
    def _is_local_without_keys(self) -> Self:
        if self.keys is None and not is_loopback(self.host):
            raise PydanticCustomError("needs_keys", "")
        return self

    @property
    def allowed_origins(self) -> frozenset[str]:
        """Web sites whose pages may call the gateway; "*" is any."""
        return frozenset(self.cors_origins.split(",") if self.cors_origins else ())

    @property
    def model_map(self) -> dict[str, str]:
        """Served names by the names in requests, for `mapped_name`."""
        pairs = self.models.split(",") if self.models else ()
        return dict(pair.split("=", 1) for pair in pairs)


def gateway_variable(field: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + field.upper()


def read_serve_settings(**given: object) -> ServeSettings:
    """Read and validate all settings; those given override the environment. Raises `CannotServe`."""
    _refuse_unknown(read_variables(ENV_FILE))
    try:
        return ServeSettings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        # A default that depends on another setting is none if any setting is wrong.
        wrong = [problem for problem in error.errors() if problem["type"] != "default_factory_not_called"]
        raise CannotServe("; ".join(map(_sentence, wrong))) from None


def read_redis_url(default: str) -> str:
    """Return the URL of the server, or the map of several, from the environment or `.env`."""
    variables = read_variables(ENV_FILE)
    if file := variables.get(REDIS_URLS):
        return MapFile(file)
    return variables.get(REDIS_URL) or default


def read_log_format() -> LogFormat:
    """Return the format of the log, from the environment or `.env`. Raises `CannotServe`."""
    match read_variables(ENV_FILE).get(_LOG_FORMAT, "text"):
        case "text" | "json" as log_format:
            return log_format
        case other:
            raise CannotServe(f"{_LOG_FORMAT}={other}: it must be 'text' or 'json'")


def read_variables(env_file: Path) -> dict[str, str]:
    """Return the variables of the environment, and those of the file, which may be missing, as pydantic reads them."""
    values = dotenv_values(env_file) if env_file.is_file() else {}
    in_file = {name.upper(): value for name, value in values.items() if value is not None}
    return in_file | {name.upper(): value for name, value in os.environ.items()}


def _refuse_unknown(names: dict[str, str]) -> None:
    known = {gateway_variable(field) for field in ServeSettings.model_fields}
    for name in sorted(name for name in names if name.startswith(PREFIX) and name not in known):
        raise CannotServe(unknown_setting(name, known))


def _sentence(problem: ErrorDetails) -> str:
    field = str(next(iter(problem["loc"]), "host"))  # the rule for several settings is about the host
    return f"{gateway_variable(field)}: {_NEEDS_KEYS if problem['type'] == 'needs_keys' else value_problem(problem)}"
