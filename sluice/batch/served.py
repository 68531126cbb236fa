"""Compares the models that a file needs with those that are served."""

from collections.abc import Callable, Collection, Mapping

from sluice.errors import describe_served
from sluice.wording import counted

_MAX_NAMED = 5

Remedy = Callable[[Mapping[str, str]], str]  # describes how to map names in the file, or "*" for all, to served models


def describe_unserved(
    models: Mapping[str, int], served: Collection[str], mapped: Mapping[str, str], remedy: Remedy
) -> str | None:
    """Return a message about the models without a worker, with a remedy; None if all are served.

    `models`: number of lines by served name, `mapped`: the mapping that led to these names.
    """
    missing = sorted(model for model in models if model not in served)
    if not missing:
        return None
    missing_text = ", ".join(f"{model} ({counted(models[model], 'line')})" for model in missing[:_MAX_NAMED])
    more = f" and {counted(len(missing) - _MAX_NAMED, 'more model')}" if len(missing) > _MAX_NAMED else ""
    name = next(iter(served)) if len(served) == 1 else "NAME"
    names = [source for model in missing[:_MAX_NAMED] for source in _sources(model, mapped)]
    advice = remedy(dict.fromkeys(names, name))
    return f"no worker serves {missing_text}{more}, and {describe_served(served)}. Start one, or {advice}"


def give_options(models: Mapping[str, str]) -> str:
    """Return the remedy for a run that is started by a command."""
    options = (f"--model {name}" if source == "*" else f"--map {source}={name}" for source, name in models.items())
    return f"send the lines to another model: {' '.join(options)}"


def set_mapping(models: Mapping[str, str]) -> str:
    """Return the remedy for a run in a worker's folder, which keeps the mapping that it was started with."""
    pairs = ",".join(f"{source}={name}" for source, name in models.items())
    return f"set {pairs} in the workers' SLUICE_BATCH_MODELS, cancel this run, and submit its file again"


def describe_unused(mapped: Mapping[str, str], named: Collection[str]) -> str | None:
    """Return a message about the names in the mapping that no line has; None if all occur."""
    names = [name for name in mapped if name != "*" and name not in named]
    if not names:
        return None
    maps = " ".join(f"--map {name}={mapped[name]}" for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return f"{maps}{more}: no line of the file names this model"


def _sources(model: str, mapped: Mapping[str, str]) -> list[str]:
    """Return the names in the mapping that lead to `model`; `model` itself if there is none."""
    return [source for source, target in mapped.items() if target == model] or [model]
