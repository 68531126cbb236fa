"""`python -m worker.supervisor.plan`: check the settings of several models, and divide the memory between them, before
one is loaded. Reads the configuration on its standard input and writes a `Plan`, both as JSON: a process of its own,
since the supervisor shall not hold MLX."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sluice.contract.keys import MODEL_NAME, is_model_name
from sluice.wording import unknown_setting
from worker.engine.checkpoint import embeds
from worker.engine.device import memory_for_model
from worker.engine.embedding import check_embedding_model
from worker.engine.memory import format_bytes
from worker.engine.model.check import check_model
from worker.engine.model.load import model_folder, not_served
from worker.environment import variable
from worker.errors import CannotStart
from worker.settings import Settings, read_settings
from worker.supervisor.decision import Demand, Plan, PlannedModel, shares

_PER_MODEL = {"model", "model_name", "worker_name"}  # settings that the supervisor writes
_OF_ALL = {"redis_url", "redis_urls", "memory_headroom_gb", "log_level", "log_format"}


def plan(config: Mapping[str, Any]) -> Plan:
    """Return the plan for a configuration: settings for all models, and under `model` a list of tables with `name`,
    `path` and settings of their own. Reads no weights. Blocks. Raises `CannotStart`."""
    common = {key: value for key, value in config.items() if key != "model"}
    _refuse_unknown(common, _PER_MODEL, "")
    tables = _tables(config.get("model"))
    all_of = read_settings(**common, model=tables[0]["path"])
    budget = memory_for_model(all_of.memory_gb, all_of.memory_headroom_gb)
    server = _one_server([_settings(common, table) for table in tables])
    models = [_planned(common, table, number, budget) for number, table in enumerate(tables)]
    divided = shares([demand for _, demand in models], budget)
    shared = [_with_share(model, share) for (model, _), share in zip(models, divided, strict=True)]
    level, log_format = all_of.log_level, all_of.log_format
    return Plan(server, log_level=level, log_format=log_format, budget=budget, models=tuple(shared))


def _one_server(settings: Sequence[Settings]) -> str:
    """Return the URL of the server that has the queues of all models. Raises `CannotStart`."""
    first = settings[0]
    for other in settings:
        if other.redis_url != first.redis_url:
            raise CannotStart(
                f"{first.redis_urls} gives models {first.model_name} and {other.model_name} different servers; start a "
                "supervisor for the models of each."
            )
    return first.redis_url


def _planned(
    common: Mapping[str, Any], table: Mapping[str, Any], number: int, budget: int
) -> tuple[PlannedModel, Demand]:
    """Return a model without its share, and what it needs. Raises `CannotStart`."""
    settings = _settings(common, table)
    least, weights = _examine(settings, budget)
    model = PlannedModel(
        name=settings.model_name,
        path=settings.model,
        nbytes=0,
        weights=weights,
        idle_unload_s=settings.idle_unload_s,
        queue_limit=settings.queue_limit,
        env=_environment(common, table, settings, number),
    )
    return model, Demand(least, _given(settings, table, least, budget))


def _with_share(model: PlannedModel, share: int) -> PlannedModel:
    limits = {variable("memory_gb"): f"{share / 1e9:.9f}", variable("memory_headroom_gb"): "0"}
    return replace(model, nbytes=share, env={**model.env, **limits})


def _tables(given: object) -> list[dict[str, Any]]:
    """Return the table of each model, with a valid name of its own. Raises `CannotStart`."""
    tables = given if isinstance(given, list) else []
    if not tables or not all(isinstance(table, dict) for table in tables):
        raise CannotStart("there is no [[model]]; write one for each model, with its name and its path.")
    for number, table in enumerate(tables, 1):
        for key in ("name", "path"):
            if not isinstance(table.get(key), str) or not table[key]:
                raise CannotStart(f"[[model]] {number} has no {key}; each needs a name and a path, both in quotes.")
        if not is_model_name(table["name"]):
            raise CannotStart(f"{table['name']!r} cannot be the name of a model; a name matches {MODEL_NAME}.")
    twice = [name for name, count in Counter(table["name"] for table in tables).items() if count > 1]
    if twice:
        raise CannotStart(f"two models are called {twice[0]!r}; give each a name of its own, as in other=FOLDER.")
    return tables


def _refuse_unknown(settings: Mapping[str, Any], forbidden: set[str], place: str) -> None:
    """Raise `CannotStart` for a key that is no setting, or not there."""
    for key in settings:
        if key in forbidden:
            other = "each [[model]] has its name and its path" if key in _PER_MODEL else "it holds for all models"
            remedy = "leave it out" if key in _PER_MODEL else "write it above the first [[model]]"
            raise CannotStart(f"{place}{key} cannot be set there: {other}; {remedy}.")
        if key not in Settings.model_fields:
            raise CannotStart(place + unknown_setting(key, sorted(set(Settings.model_fields) - _PER_MODEL)))


def _own(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in ("name", "path")}


def _settings(common: Mapping[str, Any], table: Mapping[str, Any]) -> Settings:
    place = f"model {table['name']}: "
    _refuse_unknown(_own(table), _PER_MODEL | _OF_ALL, place)
    try:
        return read_settings(**{**common, **_own(table)}, model=table["path"], model_name=table["name"])
    except CannotStart as error:
        raise CannotStart(f"{place}{error}") from None


def _examine(settings: Settings, budget: int) -> tuple[int, int]:
    """Return the bytes that the model needs at least, and those of its weights. Raises `CannotStart`."""
    folder = model_folder(settings.model, name=settings.model, only=["*.json"])
    if embeds(folder, settings.model):
        return _examine_embedding_model(settings, folder, budget)
    vision, trusted = settings.vision == "auto", settings.trust_model_code
    mtp_model = settings.mtp_model
    report = check_model(settings.model, memory=budget, vision=vision, trusted=trusted, mtp_model=mtp_model)
    if report.blockers:
        raise not_served(settings.model, report.blockers)
    drafts = {settings.draft_model, settings.specprefill_draft_model} - {None}
    of_drafts = sum(check_model(str(draft), memory=budget).costs.weights_bytes for draft in drafts)
    costs = report.costs_with_head if settings.speculation == "auto" else report.costs
    if mtp_model is None and not costs.max_tokens(budget - of_drafts):
        costs = report.costs  # a head in the model's folder is left out if it does not fit
    longest = max(1, costs.max_tokens(budget - of_drafts))
    tokens = min(filter(None, (8192, report.context, longest)))  # most conversations are shorter
    weights = costs.weights_bytes + of_drafts
    least = costs.peak_bytes([[tokens]]) + of_drafts
    if least > budget:
        raise CannotStart(_too_large(settings, f"it needs {format_bytes(least)} with its drafts", budget))
    return least, weights


def _examine_embedding_model(settings: Settings, folder: Path, budget: int) -> tuple[int, int]:
    if settings.prefix_warm is not None:
        raise CannotStart(
            f"model {settings.model_name}: it is an embedding model, without prefixes; write prefix_warm for each chat "
            "model, below its [[model]], and not for all."
        )
    costs, context = check_embedding_model(folder, settings.model, trusted=settings.trust_model_code)
    # Most inputs are shorter than 512 tokens; a worker with less memory than for those serves what fits.
    tokens = min(512, context, max(1, costs.longest(budget)))
    least = costs.weights_bytes + costs.forward_bytes(1, tokens)
    if least > budget:
        raise CannotStart(_too_large(settings, f"it needs {format_bytes(least)}", budget))
    return least, costs.weights_bytes


def _given(settings: Settings, table: Mapping[str, Any], least: int, budget: int) -> int | None:
    """Return the share that the model's table gives it. Raises `CannotStart` if that is too little or too much."""
    if "memory_gb" not in table or settings.memory_gb is None:
        return None
    given = int(settings.memory_gb * 1e9)
    if given > budget:
        raise CannotStart(_too_large(settings, f"memory_gb = {settings.memory_gb:g} is more", budget))
    if given < least:
        raise CannotStart(
            f"model {settings.model_name}: memory_gb = {settings.memory_gb:g} is too little; it needs "
            f"{format_bytes(least)} for its weights and a row."
        )
    return given


def _too_large(settings: Settings, problem: str, budget: int) -> str:
    return (
        f"model {settings.model_name}: {problem}, and all models together may take {format_bytes(budget)}: "
        "SLUICE_MEMORY_GB, or the device's, less SLUICE_MEMORY_HEADROOM_GB."
    )


def _environment(
    common: Mapping[str, Any], table: Mapping[str, Any], settings: Settings, number: int
) -> dict[str, str]:
    """Return the variables of the model's worker, without its share of memory."""
    given = {**common, **_own(table), "model": settings.model, "model_name": settings.model_name}
    # An empty map overrides that of the environment, if an option gives the URL.
    given["redis_url"], given["redis_urls"] = settings.redis_url, settings.redis_urls or ""
    if settings.metrics_port is not None and "metrics_port" not in table:
        given["metrics_port"] = settings.metrics_port + number  # each worker needs one of its own
    words = {True: "true", False: "false"}
    return {variable(key): words[value] if isinstance(value, bool) else str(value) for key, value in given.items()}


def main() -> None:
    """Write the plan, or why there is none."""
    with redirect_stdout(sys.stderr):  # what libraries print
        try:
            found = asdict(plan(json.load(sys.stdin)))
        except CannotStart as error:
            found = {"error": str(error)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
