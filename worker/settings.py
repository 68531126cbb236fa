"""Every setting, read from the environment and `.env` here and nowhere else. `.env.example` lists the same names."""

import os
import socket
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from schemas.keys import MODEL_NAME, is_model_name
from worker.errors import CannotStart
from worker.redis_url import problem, public
from worker.timetable import Crontab, Hours

PREFIX = "SLUICE_"
_NOT_OURS = {"SLUICE_TEST_REDIS_URL"}  # read by the tests


def _worker_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=".env",
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a URL has a password
    )

    redis_url: str = Field("redis://localhost:6379/0", repr=False, description="redis://, rediss:// or unix://")
    model: str = Field(description="A folder that mlx_lm.load opens, or a hub id.")
    model_name: str = Field("default", pattern=f"^{MODEL_NAME}$", description="The name that jobs ask for.")
    worker_name: str = Field(
        default_factory=_worker_name, pattern=r"^[^:]{1,200}$", description="Unique; host and pid by default."
    )

    max_rows: int = Field(16, ge=1, le=512, description="Sequences in the engine at once.")
    reserved_rows: int = Field(2, ge=0, description="Rows of those that offline jobs never take.")
    step_ms: float = Field(100.0, gt=0, description="Target milliseconds between two tokens of a row.")
    memory_gb: float | None = Field(
        None, gt=0, description="Gigabytes that the model and all rows may take, where that is less than the device's."
    )
    memory_headroom_gb: float = Field(1.0, ge=0, description="Gigabytes of those that are left free.")
    prefix_cache_gb: float | None = Field(
        None, ge=0, description="Gigabytes of those, at most, for shared prefixes and images that were seen; 0: none."
    )
    prefix_cache_per_tenant: bool = Field(False, description="Whether no tenant's request finds another's prefixes.")
    specprefill_draft_model: str | None = Field(
        None,
        min_length=1,
        description="A small model of the same tokens, as a folder or a hub id, that says what matters.",
    )
    specprefill_threshold: int = Field(8192, ge=1, description="Tokens to compute from which a prompt is thinned.")
    specprefill_max_tokens: int = Field(196_608, ge=1, description="Tokens beyond which it is not scored.")
    specprefill_keep_pct: float = Field(0.3, ge=0.1, le=1, description="Share of a thinned prompt that is computed.")
    context_tokens: int | None = Field(
        None, ge=2, description="Prompt and answer together, where that is less than the model's own context."
    )
    default_max_tokens: int = Field(1024, ge=1, description="Answer length where the request names none.")
    max_output_tokens: int | None = Field(None, ge=1, description="The longest answer that a request may ask for.")
    max_parts: int = Field(10_000, ge=1, description="Texts, images and tool calls of a conversation.")
    max_request_bytes: int = Field(16_000_000, ge=1_000, description="Size of a queued job's body.")
    allow_control_tokens: bool = Field(
        False, description="Whether control tokens in a client's text count; without it, they are text there."
    )
    vision: Literal["auto", "off"] = Field("auto", description="off serves a model that sees images for text alone.")
    trust_model_code: bool = Field(False, description="Whether code that comes in the model's folder may run.")
    max_images: int = Field(32, ge=1, description="Images of a conversation.")
    image_max_pixels: int = Field(
        25_000_000,
        ge=1,
        le=175_000_000,  # Pillow takes 178,956,970 at the most
        description="Pixels of an image; all of a request's together may have four times as many.",
    )
    image_max_bytes: int = Field(20_000_000, ge=1, description="Size of an image's file.")
    image_urls: bool = Field(False, description="Whether images are fetched from http(s) URLs, of public addresses.")

    queue_limit: int = Field(10_000, ge=1, description="Jobs in a lane; beyond it our client's submit is refused.")

    batch_dir: str | None = Field(
        None, min_length=1, description="The folder whose inbox is taken in: one for all workers that share the work."
    )
    batch_schedule: str = Field("* * * * *", description="When: a crontab expression, in UTC.")
    batch_models: str | None = Field(
        None, min_length=1, description="Served names for those in the files: theirs=ours,... with * for any other."
    )
    batch_hours: str | None = Field(
        None, description="Of a day, in UTC, when offline jobs may take every row that is not reserved."
    )
    batch_rows_outside: int = Field(0, ge=0, description="Rows that they may take at other times.")

    lease_s: float = Field(10.0, ge=1, description="Seconds until a dead worker's jobs are taken over.")
    hang_s: float = Field(
        60.0, gt=0, description="End the process when its event loop or engine has not moved for so long."
    )
    grace_s: float = Field(30.0, ge=0, description="Seconds that running rows may go on after SIGTERM.")
    disconnect_grace_s: float = Field(10.0, ge=0, description="With on_disconnect: cancel, how long nobody may listen.")
    poll_s: float = Field(1.0, gt=0, description="Look at the queue this often even when nothing woke us.")
    keyspace_events: bool = Field(
        True, description="Set notify-keyspace-events, so that plain arq producers wake the worker."
    )

    metrics_port: int | None = Field(None, ge=1, le=65_535, description="Where metrics and health are served.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Of the worker's log.")
    log_ttl_s: int = Field(600, ge=1, description="Seconds that a job's events outlive it.")
    result_ttl_s: int = Field(3600, ge=1, description="Seconds that its result and state do.")

    @field_validator("redis_url")
    @classmethod
    def _can_be_read(cls, url: str) -> str:
        if said := problem(url):
            raise ValueError(said)
        return url

    @field_validator("reserved_rows")
    @classmethod
    def _leaves_a_row(cls, reserved: int, info: object) -> int:
        rows = info.data.get("max_rows", reserved + 1)  # type: ignore[attr-defined]
        if reserved >= rows:
            raise ValueError(f"{reserved} of {rows} rows reserved leaves none for offline jobs")
        return reserved

    @field_validator("batch_schedule")
    @classmethod
    def _is_a_crontab(cls, expression: str) -> str:
        Crontab(expression)
        return expression

    @field_validator("batch_models")
    @classmethod
    def _names_served_models(cls, said: str | None) -> str | None:
        for pair in said.split(",") if said else ():
            theirs, _, ours = pair.partition("=")
            if not theirs or theirs != theirs.strip() or not is_model_name(ours):
                raise ValueError(f"{pair!r} must look like gpt-4o-mini=default")
        return said

    @field_validator("batch_hours")
    @classmethod
    def _are_hours(cls, said: str | None) -> str | None:
        if said is not None:
            Hours.read(said)
        return said

    @field_validator("result_ttl_s")
    @classmethod
    def _outlives_the_events(cls, state_s: int, info: object) -> int:
        """Else a new job of that id would go on after the events of the old one."""
        events_s = info.data.get("log_ttl_s", state_s)  # type: ignore[attr-defined]
        if state_s < events_s:
            raise ValueError(f"a job's state must be kept at least as long as its events, {events_s} s")
        return state_s


def read_settings(**given: object) -> Settings:
    """Raises `CannotStart` with a sentence that names the variable and what would be right."""
    _refuse_unknown()
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise CannotStart(_in_terms_of_variables(error)) from None


def _refuse_unknown() -> None:
    """A misspelt setting that is silently ignored costs an afternoon."""
    known = {variable(name) for name in Settings.model_fields}
    for name in sorted(_set_names() - known - _NOT_OURS):
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "see .env.example for the names."
        raise CannotStart(f"{name} is not a setting; {hint}")


def _set_names() -> set[str]:
    names = {name.upper() for name in os.environ}
    dotenv = Path(str(Settings.model_config["env_file"]))
    if dotenv.is_file():
        lines = dotenv.read_text().splitlines()
        names |= {line.split("=")[0].removeprefix("export ").strip().upper() for line in lines if "=" in line}
    return {name for name in names if name.startswith(PREFIX)}


def variable(field: str) -> str:
    return PREFIX + field.upper()


def environment(redis_url: str) -> dict[str, str]:
    """Of a child that talks to our server: on a command line, everybody on the machine could read the password."""
    return {**os.environ, variable("redis_url"): redis_url}


_WRONG = {
    "int_parsing": "it must be a whole number",
    "int_parsing_size": "it must be a whole number, and not so long",
    "int_from_float": "it must be a whole number",
    "float_parsing": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_parsing": "it must be true or false",
    "greater_than": "it must be more than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
    "literal_error": "it must be {expected}",
    "string_pattern_mismatch": "it must match {pattern}",
    "string_too_short": "it must not be empty",
    "value_error": "{error}",
}
_OTHERWISE = "it is not valid; .env.example says what is"


def _in_terms_of_variables(error: ValidationError) -> str:
    return "; ".join(map(_sentence, error.errors()))


def _sentence(problem: ErrorDetails) -> str:
    field, value = str(problem["loc"][0]), problem["input"]
    if problem["type"] == "missing":
        return f"{variable(field)} is not set: {Settings.model_fields[field].description}"
    bounds = {name: f"{each:g}" if isinstance(each, float) else each for name, each in problem.get("ctx", {}).items()}
    shown = public(str(value)) if field == "redis_url" else value
    return f"{variable(field)}={shown}: {_WRONG.get(problem['type'], _OTHERWISE).format(**bounds)}"
