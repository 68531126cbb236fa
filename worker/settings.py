"""All settings. They are read from the environment and `.env`, only here.

`python -m docs.settings_page` writes `.env.example` and docs/settings.md from the fields: an optional setting's
description ends with its "Default: ..." in words, and `examples` holds a value to show in `.env.example`.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from sluice.batch.times import Crontab, Hours
from sluice.contract.keys import DEFAULT_MODEL, MAX_REQUEST_BYTES, MODEL_NAME, RESULT_TTL_S, is_model_name
from sluice.contract.redis_url import Servers, redacted, url_error
from sluice.log_lines import LogFormat
from sluice.wording import value_problem
from worker.engine.options import EngineOptions
from worker.environment import PREFIX, refuse_unknown, unique_worker_name, variable
from worker.errors import CannotStart
from worker.prefix_store.encryption import checked_key, decode_key
from worker.prefix_store.store import StoreOptions

_REDIS_URL = "redis://localhost:6379/0"


# Checks of settings whose values have a form of their own. Each returns the value, or raises ValueError.


def _checked_schedule(expression: str) -> str:
    """Check a crontab expression."""
    Crontab(expression)
    return expression


def _checked_hours(hours: str) -> str:
    """Check hours of the day."""
    Hours.read(hours)
    return hours


def _checked_courtesy(courtesy: str) -> str:
    """Check a share, or a word."""
    try:
        fine = courtesy in ("auto", "off") or 0.05 <= float(courtesy) <= 1
    except ValueError:
        fine = False
    if not fine:
        raise ValueError("must be auto, off, or a share from 0.05 to 1, such as 0.5")
    return courtesy


def _checked_models(models: str) -> str:
    """Check pairs of a requested and a served model."""
    for pair in models.split(","):
        requested, _, served = pair.partition("=")
        if not requested or requested != requested.strip() or not is_model_name(served):
            raise ValueError(f"{pair!r} must look like gpt-4o-mini=default")
        if "*" in requested[:-1]:
            raise ValueError(f"{pair!r} has a * before the end of the name; write it last, as in claude-*=default")
    return models


class Settings(BaseSettings):
    """The worker's settings. Each is read from the variable `SLUICE_` + its name in capitals."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=".env",
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a URL has a password
    )

    redis_url: str = Field(
        _REDIS_URL,
        repr=False,
        description="URL of the Redis server: redis://, rediss://, unix:// or redis+sentinel://. In a password, write "
        "/ as %2F, ? as %3F, # as %23 and @ as %40.",
    )
    redis_urls: str | None = Field(
        None,
        description="TOML file that spreads models over servers, in place of SLUICE_REDIS_URL, for all programs: see "
        "docs/operations.md. Default: none, there is one server.",
    )
    model: str = Field(
        examples=["models/tiny-chat"],
        description="A model folder that mlx_lm.load opens, or a hub id such as mlx-community/Qwen3-4B-4bit.",
    )
    model_name: str = Field(
        DEFAULT_MODEL,
        pattern=f"^{MODEL_NAME}$",
        description="The name that requests ask for. It is a part of the queues' names.",
    )
    worker_name: str = Field(
        default_factory=unique_worker_name,
        pattern=r"^[^:]{1,200}$",
        description="Name of this worker, unique among all workers of the server. Default: host name and process id.",
    )
    vision: Literal["auto", "off"] = Field(
        "auto",
        description="auto serves images if the model takes them; off serves text only.",
    )
    trust_model_code: bool = Field(
        False,
        description="Allow Python code in the model's folder to run. If false, a model that needs it is refused.",
    )

    max_rows: int = Field(16, ge=1, le=512, description="Maximum number of sequences in the running batch.")
    reserved_rows: int = Field(
        default_factory=lambda given: min(2, given.get("max_rows", 3) - 1),
        ge=0,
        examples=["2"],
        description="Rows that offline jobs never take. Default: 2, or all but one of fewer rows.",
    )
    step_ms: float = Field(
        100.0,
        gt=0,
        description="Target time between two tokens of a row, in milliseconds. While interactive prompts wait, a gap"
        " may grow to three times this, or to two and a half times the decode time of all rows.",
    )
    memory_gb: float | None = Field(
        None,
        gt=0,
        description="Memory that the model and all rows may take, in gigabytes. Default: the device's limit.",
    )
    memory_headroom_gb: float = Field(
        1.0,
        ge=0,
        description="Memory that is kept free, in gigabytes.",
    )
    courtesy: Annotated[str, AfterValidator(_checked_courtesy)] = Field(
        "auto",
        description="What is left to others while a person uses the machine, it is hot or on battery: with `auto` "
        "offline jobs alone take a quarter of the time, with a share such as 0.5 all jobs take that, and with `off` "
        "nothing is left, nor memory given back.",
    )
    stay_awake: Literal["auto", "always", "off"] = Field(
        "auto",
        description="Hold the machine's sleep off while jobs run: `auto` for offline jobs only on mains power, "
        "`always` on battery too.",
    )
    idle_unload_s: float | None = Field(
        None,
        gt=0,
        examples=["600"],
        description="Seconds without a job after which a model leaves memory, until one comes. Default: never.",
    )
    prefix_cache_gb: float | None = Field(
        None,
        ge=0,
        description="Maximum size of the prefix cache, image features included, in gigabytes. 0 disables it. "
        "Default: a quarter of the memory that the model leaves.",
    )
    prefix_cache_per_tenant: bool = Field(False, description="Let no tenant reuse another's prefixes.")
    affinity: bool = Field(
        True,
        description="Leave jobs to workers that are done with their prompts sooner, by prefix caches and loads. "
        "Needs a prefix cache.",
    )

    prefix_disk_dir: Path | None = Field(
        None,
        examples=["/var/lib/sluice/prefixes"],
        description="Folder in which cached prefixes survive eviction and restarts. The files hold prompts in plain "
        "form unless `SLUICE_PREFIX_DISK_KEY` is set. Default: none, prefixes are kept in memory only.",
    )
    prefix_disk_gb: float = Field(
        20.0,
        gt=0,
        description="Maximum size of all files in SLUICE_PREFIX_DISK_DIR, in gigabytes.",
    )
    prefix_disk_daily_gb: float | None = Field(
        None,
        gt=0,
        description="Maximum that all workers together write there in a day, in gigabytes. Default: five times "
        "`SLUICE_PREFIX_DISK_GB`.",
    )
    prefix_disk_key: Annotated[str, AfterValidator(checked_key)] | None = Field(
        None,
        repr=False,
        description="Key that encrypts these files: 32 bytes in base64 (`openssl rand -base64 32`). Needs the extra "
        "`encryption`. Default: none, files are not encrypted.",
    )
    prefix_disk_bits: Literal["exact", "8"] = Field(
        "exact",
        description="Bits of a KV value there. 8 takes half the bytes; answers after a loaded prefix may then differ.",
    )
    prefix_warm: Path | None = Field(
        None,
        examples=["/etc/sluice/prompts.json"],
        description="JSON file of prompts that the worker computes at its start. Default: none.",
    )

    loop_guard: bool = Field(
        True,
        description="End what repeats the same tokens over and over, unless a request has `loop_guard: false`.",
    )

    speculation: Literal["auto", "off"] = Field(
        "auto",
        description="Speculative decoding: `auto` verifies several tokens of a row in one forward when that is "
        "faster. Answers are the same.",
    )
    mtp_model: str | None = Field(
        None,
        min_length=1,
        description="Speculation: the checkpoint whose multi-token prediction (MTP) head drafts. Default: the head "
        "in the model's own folder, if that has one.",
    )
    draft_model: str | None = Field(
        None,
        min_length=1,
        description="Speculation: a smaller model with the same tokenizer that drafts. Default: none.",
    )

    specprefill_draft_model: str | None = Field(
        None,
        min_length=1,
        description="SpecPrefill: a smaller model with the same tokenizer that scores long prompts. Default: none, "
        "prompts are computed whole.",
    )
    specprefill_threshold: int = Field(
        8192,
        ge=1,
        description="SpecPrefill: shortest prompt that is scored, in tokens that are not cached.",
    )
    specprefill_max_tokens: int = Field(
        196_608,
        ge=1,
        description="SpecPrefill: longest prompt that is scored, in tokens.",
    )
    specprefill_keep_pct: float = Field(
        0.3,
        ge=0.1,
        le=1,
        description="SpecPrefill: share (not percent) of the droppable prompt tokens that is computed.",
    )

    context_tokens: int | None = Field(
        None,
        ge=2,
        description="Maximum length of prompt and answer together, in tokens. Default: the model's context.",
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum length of an answer, in tokens, if the request has no max_tokens. Default: what the "
        "context leaves.",
    )
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="Largest max_tokens that a request may ask for. Default: what the context leaves.",
    )
    max_content_parts: int = Field(
        10_000, ge=1, description="Maximum number of texts, images and tool calls in a conversation."
    )
    max_request_bytes: int = Field(MAX_REQUEST_BYTES, ge=1_000, description="Maximum size of a queued job, in bytes.")
    allow_control_tokens: bool = Field(
        False,
        description="Read control tokens such as <|im_end|> in a request's text as tokens. If false they are plain "
        "text.",
    )
    tool_grammar: bool = Field(
        True,
        description="Hold all calls to the schemas of their functions. If false, only forced calls, and those of "
        "functions with strict: true.",
    )
    queue_limit: int = Field(
        10_000,
        ge=1,
        description="Maximum number of jobs in a lane. Beyond it our client's submit raises QueueFull; other "
        "producers are not limited.",
    )

    max_images: int = Field(
        500,  # OpenAI's; what bounds memory is the sum of their pixels
        ge=1,
        description="Maximum number of images in a conversation.",
    )
    image_max_pixels: int = Field(
        25_000_000,
        ge=1,
        le=175_000_000,  # Pillow takes 178,956,970 at the most
        description="Maximum pixels of an image. All images of a request together may have four times as many.",
    )
    image_max_bytes: int = Field(
        20_000_000,
        ge=1,
        description="Maximum size of an image file, in bytes.",
    )
    image_urls: bool = Field(
        False, description="Fetch images from http and https URLs too; only from public addresses."
    )

    batch_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder for offline batches: the workers run the files in its inbox/. Default: none.",
    )
    batch_schedule: Annotated[str, AfterValidator(_checked_schedule)] = Field(
        "* * * * *", description="When files are taken from the inbox: a crontab expression, in UTC."
    )
    batch_models: Annotated[str, AfterValidator(_checked_models)] | None = Field(
        None,
        min_length=1,
        description="Served models for the model names in batch files, such as gpt-4o-mini=default,gpt-*=big. "
        "Default: names are taken as they are.",
    )
    batch_hours: Annotated[str, AfterValidator(_checked_hours)] | None = Field(
        None,
        description="Hours of the day, in UTC, in which offline jobs may take all rows but the reserved ones, such as "
        "22:00-06:00. Default: always.",
    )
    batch_off_hours_rows: int = Field(
        0, ge=0, description="Rows of a worker that offline jobs may take outside of these hours."
    )

    lease_s: float = Field(10.0, ge=1, description="Seconds until other workers take over the jobs of a dead worker.")
    watchdog_s: float = Field(
        60.0,
        gt=0,
        description="Seconds without progress of event loop or engine after which the process ends.",
    )
    grace_s: float = Field(
        30.0, ge=0, description="Seconds that running rows may continue after SIGTERM before they are requeued."
    )
    disconnect_grace_s: float = Field(
        10.0,
        ge=0,
        description='Seconds without a subscriber after which a job with on_disconnect: "cancel" is cancelled.',
    )
    poll_s: float = Field(
        1.0, gt=0, description="Interval at which the queue is polled if nothing wakes the worker, in seconds."
    )
    keyspace_events: bool = Field(
        True,
        description='Add "Kz" to notify-keyspace-events of the server, so that plain arq producers wake workers.',
    )

    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65_535,
        examples=["9100"],
        description="Port of /metrics, /healthz and /readyz. Default: none, they are not served.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Level of the worker's log.")
    log_format: LogFormat = Field(
        "text", description="Format of the log of workers and gateways; json has a line for each record, in UTC."
    )
    log_ttl_s: int = Field(600, ge=1, description="Seconds that a job's events are kept after its end.")
    result_ttl_s: int = Field(
        default_factory=lambda given: max(RESULT_TTL_S, given.get("log_ttl_s", 0)),
        ge=1,
        examples=["3600"],
        description="Seconds that a job's result and state are kept after its end. Default: 3600, or as long as its "
        "events if those are kept longer.",
    )

    @field_validator("redis_url", mode="before")
    @classmethod
    def _empty_is_unset(cls, url: object) -> object:
        """Use the default for an empty URL, since Compose files set variables without a value to an empty string."""
        return url or _REDIS_URL

    @field_validator("redis_url")
    @classmethod
    def _can_be_read(cls, url: str) -> str:
        if problem := url_error(url):
            raise ValueError(problem)
        return url

    @field_validator("redis_urls")
    @classmethod
    def _names_servers(cls, file: str | None) -> str | None:
        if file:
            Servers.read(file)
        return file or None

    @field_validator("reserved_rows")
    @classmethod
    def _leaves_a_row(cls, reserved: int, info: object) -> int:
        rows = info.data.get("max_rows", reserved + 1)  # type: ignore[attr-defined]
        if reserved >= rows:
            raise ValueError(f"{reserved} of {rows} rows reserved leaves none for offline jobs; reserve fewer")
        return reserved

    @field_validator("prefix_disk_dir", "prefix_warm")
    @classmethod
    def _has_a_cache_in_memory(cls, path: Path | None, info: object) -> Path | None:
        if path is not None and info.data.get("prefix_cache_gb") == 0:  # type: ignore[attr-defined]
            raise ValueError("it needs the prefix cache in memory; let SLUICE_PREFIX_CACHE_GB be more than 0")
        return path

    @field_validator("mtp_model", "draft_model")
    @classmethod
    def _is_used(cls, model: str | None, info: object) -> str | None:
        if model is not None and info.data.get("speculation") == "off":  # type: ignore[attr-defined]
            raise ValueError("with SLUICE_SPECULATION=off nothing is drafted; set it to auto, or leave this out")
        return model

    @field_validator("result_ttl_s")
    @classmethod
    def _outlives_the_events(cls, state_s: int, info: object) -> int:
        """Refuse a state that expires before its events: a new job of that id would append to the old job's events."""
        events_s = info.data.get("log_ttl_s", state_s)  # type: ignore[attr-defined]
        if state_s < events_s:
            raise ValueError(f"a job's state must be kept at least as long as its events, {events_s} s")
        return state_s

    @property
    def server(self) -> str:
        """The server, and the setting that names it, without its password."""
        url = redacted(self.redis_url)
        return f"SLUICE_REDIS_URLS={self.redis_urls}: {url}" if self.redis_urls else f"SLUICE_REDIS_URL={url}"

    @property
    def has_affinity(self) -> bool:
        """True if jobs are left to better workers. A worker without a prefix cache holds nothing to promise."""
        return self.affinity and self.prefix_cache_gb != 0

    def engine_options(self, memory: int) -> EngineOptions:
        """Return the options of the engine. `memory`: bytes that weights, rows and caches may take together."""
        return EngineOptions(
            step_s=self.step_ms / 1000,
            rows=self.max_rows,
            memory=memory,
            prefix_bytes=None if self.prefix_cache_gb is None else int(self.prefix_cache_gb * 1e9),
            disk=self._prefix_store(),
            disk_bits=None if self.prefix_disk_bits == "exact" else int(self.prefix_disk_bits),
            speculation=self.speculation == "auto",
        )

    def _prefix_store(self) -> StoreOptions | None:
        """Return where prefixes are stored; None: nowhere."""
        if self.prefix_disk_dir is None:
            return None
        daily_gb = self.prefix_disk_daily_gb or 5 * self.prefix_disk_gb
        key = decode_key(self.prefix_disk_key) if self.prefix_disk_key else None
        folder = self.prefix_disk_dir.expanduser()
        return StoreOptions(folder, int(self.prefix_disk_gb * 1e9), int(daily_gb * 1e9), key=key, label=self.model)


def read_settings(**given: object) -> Settings:
    """Read and validate all settings. Raises `CannotStart`, which names the variable and what is accepted."""
    refuse_unknown(Settings.model_fields, Path(str(Settings.model_config["env_file"])))
    if "redis_url" in given:  # an option is for one server
        given = {"redis_urls": None, **given}
    try:
        settings = Settings(**given)  # type: ignore[arg-type]
        if settings.redis_urls is None:
            return settings
        return settings.model_copy(
            update={"redis_url": Servers.read(settings.redis_urls).of_model(settings.model_name)}
        )
    except ValidationError as error:
        # A default that depends on another setting is none if any setting is wrong.
        wrong = [problem for problem in error.errors() if problem["type"] != "default_factory_not_called"]
        raise CannotStart("; ".join(map(_sentence, wrong))) from None


def _sentence(problem: ErrorDetails) -> str:
    field = str(problem["loc"][0])
    if problem["type"] == "missing":
        option = f"set it, or give --{field}"
        return f"{variable(field)} is not set; {option}: {Settings.model_fields[field].description}"
    value = str(problem["input"])
    public = {"redis_url": redacted(value), "prefix_disk_key": "***"}.get(field, value)
    return f"{variable(field)}={public}: {value_problem(problem)}"
