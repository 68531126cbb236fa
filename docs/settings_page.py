"""Write `.env.example` and docs/settings.md from the fields of both programs' settings and from the metrics.

`python -m docs.settings_page` writes both files; with `--check` it only reports those that are out of date.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from prometheus_client import CollectorRegistry
from pydantic.fields import FieldInfo

from sluice.contract.batch import NO_LINES, Batch
from sluice.gateway.monitoring import GatewayMetrics as GatewayMetrics
from sluice.gateway.settings import ServeSettings, gateway_variable
from sluice.queues import QueueHead
from worker.environment import variable
from worker.monitoring.metrics import Metrics
from worker.settings import Settings

ROOT = Path(__file__).parent.parent
ENV_EXAMPLE = ROOT / ".env.example"
PAGE = ROOT / "docs" / "settings.md"

# Who sets what, those that matter first. Each setting is in one group.
GROUPS = {
    "The dozen that matter first": "redis_url model model_name max_rows step_ms memory_gb prefix_disk_dir batch_dir "
    "metrics_port serve_host serve_keys serve_models",
    "Who chooses the model": "vision trust_model_code context_tokens tool_grammar loop_guard allow_control_tokens "
    "speculation mtp_model draft_model specprefill_draft_model specprefill_threshold specprefill_max_tokens "
    "specprefill_keep_pct",
    "Who owns the machine": "reserved_rows memory_headroom_gb courtesy stay_awake idle_unload_s prefix_cache_gb "
    "prefix_cache_per_tenant prefix_disk_gb prefix_disk_daily_gb prefix_disk_key prefix_disk_bits prefix_warm affinity",
    "Who answers for the clients": "default_max_tokens max_output_tokens max_content_parts max_request_bytes "
    "queue_limit max_images image_max_pixels image_max_bytes image_urls",
    "Who plans offline batches": "batch_schedule batch_models batch_hours batch_off_hours_rows",
    "Who operates the workers": "redis_urls worker_name lease_s watchdog_s grace_s disconnect_grace_s poll_s "
    "keyspace_events log_level log_format log_ttl_s result_ttl_s",
    "HTTP gateway": "serve_port serve_no_worker_s serve_heartbeat_s serve_disconnect_grace_s serve_max_body_bytes "
    "serve_max_held_bytes serve_response_ttl_s serve_strict serve_batch_dir serve_max_connections_per_key "
    "serve_client_timeout_s serve_cors_origins serve_drain_s serve_webhooks",
}

_ENV_HEAD = """\
# Settings of the worker and of the HTTP gateway, with their defaults. Copy this file to .env and change what you need.
# A name that starts with SLUICE_ and is not listed here is refused at start.
# Written by python -m docs.settings_page from worker/settings.py and sluice/gateway/settings.py: edit the
# descriptions there.
"""
_PAGE_HEAD = """\
# Settings

<!-- Written by python -m docs.settings_page: edit the descriptions in the code. -->

A worker reads its settings from the environment and from a file `.env` in its working directory; the environment wins.
[.env.example](../.env.example) is ready to copy. A wrong value, or a name that begins with `SLUICE_` and is no setting,
ends the start. `sluice serve`, the [HTTP gateway](gateway.md), reads `SLUICE_REDIS_URL`, `SLUICE_REDIS_URLS` and what
begins with `SLUICE_SERVE_` from the same places.

In parentheses stand the default and, after a semicolon, the values that a setting takes.
"""
_METRICS_HEAD = """\
## Metrics

With `SLUICE_METRICS_PORT=9100` a worker serves these to Prometheus at `http://<machine>:9100/metrics`. Those of `vllm:`
mean what vLLM's do. All have the label `model_name`. What ends in `_total` is a counter.

"""
_GATEWAY_METRICS_HEAD = """
The HTTP gateway serves these at `/metrics` of its own port:

"""

Setting = tuple[str, FieldInfo]  # its variable, and its field


def main() -> int:
    """Write or check both files, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.settings_page", description="Write .env.example and docs/settings.md from the code."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    out_of_date = False
    for path, text in ((ENV_EXAMPLE, env_example()), (PAGE, page())):
        if not check:
            path.write_text(text, "utf-8")
        elif not path.is_file() or path.read_text("utf-8") != text:
            print(f"{path.name} is out of date: run python -m docs.settings_page", file=sys.stderr)
            out_of_date = True
    return int(out_of_date)


def env_example() -> str:
    """Return the contents of .env.example."""
    parts = [_ENV_HEAD]
    for title, fields in sections():
        parts.append(f"\n# {title}\n")
        parts += [_env_lines(name, field) for name, field in fields]
    return "".join(parts)


def page() -> str:
    """Return the contents of docs/settings.md."""
    parts = [_PAGE_HEAD]
    for title, fields in sections():
        parts.append(f"\n## {title}\n\n")
        parts += [_setting_line(name, field) for name, field in fields]
    metrics = [_METRICS_HEAD, *_metric_lines(Metrics("default").registry)]
    of_gateway = [_GATEWAY_METRICS_HEAD, *_metric_lines(gateway_metrics().registry)]
    return "".join([*parts, "\n", *metrics, *of_gateway])


def gateway_metrics() -> GatewayMetrics:
    """Return metrics with a sample of each family, from which the labels are read."""
    metrics = GatewayMetrics()
    metrics.ended("", "", 0, 0.0)
    metrics.first_token("", 0.0)
    metrics.finished("", "", 0.0)
    metrics.queues.set([""], [QueueHead("", "batch", 0, 0, {}, True)])
    run = Batch(
        id="", input_file_id="", completion_window="", status="validating", created_at=0, request_counts=NO_LINES
    )
    metrics.runs.set([run], 0.0)
    return metrics


def sections() -> list[tuple[str, list[Setting]]]:
    """Return the settings by group. Raises KeyError if a group names one that does not exist."""
    fields = {name: (variable(name), field) for name, field in Settings.model_fields.items()}
    of_gateway = {f"serve_{name}": (gateway_variable(name), each) for name, each in ServeSettings.model_fields.items()}
    known = fields | of_gateway
    return [(title, [known[name] for name in names.split()]) for title, names in GROUPS.items()]


# .env.example


def _env_lines(name: str, field: FieldInfo) -> str:
    comment = textwrap.fill(
        _description(field), 118, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
    shown = _plain(field.default) if _has_default(field) else next(iter(field.examples or ()), "")
    commented_out = "" if _has_default(field) or field.is_required() else "# "
    return f"{comment}\n{commented_out}{name}={shown}\n"


# docs/settings.md


def _setting_line(name: str, field: FieldInfo) -> str:
    text, _, in_words = _description(field).partition(" Default: ")
    if field.is_required():
        default = "required"
    elif _has_default(field):
        default = f"`{_plain(field.default)}`"
    else:
        default = in_words.rstrip(".")
    values = _values(field)
    return f"- `{name}` ({f'{default}; {values}' if values else default}): {_marked(text)}\n"


def _metric_lines(registry: CollectorRegistry) -> Iterator[str]:
    for family in registry.collect():
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        others = ", ".join(label for label in labels if label not in ("model_name", "le"))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"- `{name}`{f' ({others})' if others else ''}: {_marked(family.documentation)}\n"


def _values(field: FieldInfo) -> str:
    """Return the values that a setting takes, from its type and bounds; nothing for a text, or for true and false."""
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(field.annotation))
    return _range(field.metadata) if {int, float} & set(kinds) and bool not in kinds else ""


def _range(metadata: list[Any]) -> str:
    bounds = {name: getattr(item, name) for item in metadata for name in ("ge", "gt", "le") if hasattr(item, name)}
    above = "gt" in bounds
    low = f"above {bounds['gt']:g}" if above else f"{bounds['ge']:,}"
    if "le" in bounds:
        return f"{low} … {bounds['le']:,}"
    return low if above else f"{low} or more"


def _marked(text: str) -> str:
    """Return text for the page, with names of settings and what looks like code in backquotes."""
    return re.sub(r"(?<!`)(SLUICE_\w+|<\|\w+\|>)", r"`\1`", text)


def _description(field: FieldInfo) -> str:
    assert field.description, "a setting without a description"
    return field.description


def _has_default(field: FieldInfo) -> bool:
    return not field.is_required() and field.default_factory is None and field.default is not None


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
