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

from sluice.gateway.monitoring.metrics import Metrics as GatewayMetrics
from sluice.gateway.settings import ServeSettings
from sluice.gateway.settings import variable as gateway_variable
from worker.environment import variable
from worker.monitoring.metrics import Metrics
from worker.settings import Settings

ROOT = Path(__file__).parent.parent
ENV_EXAMPLE = ROOT / ".env.example"
PAGE = ROOT / "docs" / "settings.md"

# The first setting of each section; the sections follow the order of the fields.
SECTIONS = {
    "redis_url": "Server and model",
    "max_rows": "Running batch and memory",
    "speculation": "Speculation and SpecPrefill",
    "context_tokens": "Requests",
    "max_images": "Images",
    "batch_dir": "Offline batches",
    "lease_s": "Leases, shutdown and polling",
    "metrics_port": "Monitoring and lifetimes",
}

_GATEWAY = "HTTP gateway"  # the last section

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
[.env.example](../.env.example) has the same list, ready to copy. A worker does not start if a value is wrong or if a
name that begins with `SLUICE_` is not a setting; the error names the variable and, for a misspelt one, the setting that
is closest.

`python -m worker` takes no arguments. `sluice worker` has options for the settings that are changed most often
(`sluice worker --help`), and the other commands of `sluice` take `--redis-url` and `--model`, or read
`SLUICE_REDIS_URL` and `SLUICE_MODEL_NAME` from the environment. The tests read one more variable,
`SLUICE_TEST_REDIS_URL`: a server to use in place of their own.

`sluice serve`, the [HTTP gateway](gateway.md), reads `SLUICE_REDIS_URL` and the settings that begin with
`SLUICE_SERVE_` ([below](#http-gateway)) from the same places, and refuses misspelt ones. Worker and gateway ignore each
other's settings, so one `.env` serves both.
"""
_METRICS_HEAD = """\
## Metrics

With `SLUICE_METRICS_PORT=9100` a worker serves these metrics to Prometheus at `http://<machine>:9100/metrics`. Names
with the prefix `vllm:` are vLLM's and mean the same, so dashboards and alerts for vLLM work. Every metric has the label
`model_name`; the table lists the others.

| metric | type | labels | description |
|---|---|---|---|
"""
_GATEWAY_METRICS_HEAD = """
The HTTP gateway serves these at `/metrics` of its own port:

| metric | type | labels | description |
|---|---|---|---|
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
        parts.append(f"\n## {title}\n\n| setting | default | values | description |\n|---|---|---|---|\n")
        parts += [_setting_row(name, field) for name, field in fields]
    metrics = [_METRICS_HEAD, *_metric_rows(Metrics("default").registry)]
    gateway_metrics = [_GATEWAY_METRICS_HEAD, *_metric_rows(_gateway_metrics().registry)]
    return "".join([*parts, "\n", *metrics, *gateway_metrics])


def _gateway_metrics() -> GatewayMetrics:
    """Return metrics with a sample of each family, from which the labels are read."""
    metrics = GatewayMetrics()
    metrics.ended("", "", 0, 0.0)
    metrics.first_token("", 0.0)
    metrics.finished("", "", 0.0)
    return metrics


def sections() -> list[tuple[str, list[Setting]]]:
    """Return the settings by section, in the order of the fields, the gateway's last. Raises KeyError if the first has
    no section."""
    found: list[tuple[str, list[Setting]]] = []
    for name, field in Settings.model_fields.items():
        if not found or name in SECTIONS:
            found.append((SECTIONS[name], []))
        found[-1][1].append((variable(name), field))
    gateway = [(gateway_variable(name), field) for name, field in ServeSettings.model_fields.items()]
    return [*found, (_GATEWAY, gateway)]


# .env.example


def _env_lines(name: str, field: FieldInfo) -> str:
    comment = textwrap.fill(
        _description(field), 118, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
    shown = _plain(field.default) if _has_default(field) else next(iter(field.examples or ()), "")
    commented_out = "" if _has_default(field) or field.is_required() else "# "
    return f"{comment}\n{commented_out}{name}={shown}\n"


# docs/settings.md


def _setting_row(name: str, field: FieldInfo) -> str:
    text, _, in_words = _description(field).partition(" Default: ")
    if field.is_required():
        default = "required"
    elif _has_default(field):
        default = f"`{_plain(field.default)}`"
    else:
        default = in_words.rstrip(".")
    return f"| `{name}` | {default} | {_values(field)} | {_cell(text)} |\n"


def _metric_rows(registry: CollectorRegistry) -> Iterator[str]:
    for family in registry.collect():
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        shown = ", ".join(f"`{label}`" for label in labels if label not in ("model_name", "le")) or "–"
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"| `{name}` | {family.type} | {shown} | {_cell(family.documentation)} |\n"


def _values(field: FieldInfo) -> str:
    """Return the values that a setting takes, from its type and bounds."""
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(field.annotation))
    if bool in kinds:
        return "`true`, `false`"
    return _range(field.metadata) if {int, float} & set(kinds) else "text"


def _range(metadata: list[Any]) -> str:
    bounds = {name: getattr(item, name) for item in metadata for name in ("ge", "gt", "le") if hasattr(item, name)}
    above = "gt" in bounds
    low = f"above {bounds['gt']:g}" if above else f"{bounds['ge']:,}"
    if "le" in bounds:
        return f"{low} … {bounds['le']:,}"
    return low if above else f"{low} or more"


def _cell(text: str) -> str:
    """Return text for a table cell, with names of settings and what looks like code in backquotes."""
    return re.sub(r"(?<!`)(SLUICE_\w+|<\|\w+\|>)", r"`\1`", text).replace("|", "\\|")


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
