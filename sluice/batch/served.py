"""Compares the models that a file needs with those that are served."""

from collections.abc import Collection, Mapping

from sluice.errors import describe_served
from sluice.wording import counted

_MAX_NAMED = 5


def describe_unserved(models: Mapping[str, int], served: Collection[str], mapped: Mapping[str, str]) -> str | None:
    """Return a message about the models without a worker, with a remedy; None if all are served.

    `models`: number of lines by served name, `mapped`: the mapping that led to these names.
    """
    missing = sorted(model for model in models if model not in served)
    if not missing:
        return None
    missing_text = ", ".join(f"{model} ({counted(models[model], 'line')})" for model in missing[:_MAX_NAMED])
    more = f" and {counted(len(missing) - _MAX_NAMED, 'more model')}" if len(missing) > _MAX_NAMED else ""
    name = next(iter(served)) if len(served) == 1 else "NAME"
    maps = " ".join(option for model in missing[:_MAX_NAMED] for option in _options(model, name, mapped))
    remedy = f"Start one, or send the lines to another model: {maps}"
    return f"no worker serves {missing_text}{more}, and {describe_served(served)}. {remedy}"


def describe_unused(mapped: Mapping[str, str], named: Collection[str]) -> str | None:
    """Return a message about the names in the mapping that no line has; None if all occur."""
    names = [name for name in mapped if name != "*" and name not in named]
    if not names:
        return None
    maps = " ".join(f"--map {name}={mapped[name]}" for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return f"{maps}{more}: no line of the file names this model"


def _options(model: str, name: str, mapped: Mapping[str, str]) -> list[str]:
    """Return the options that send the lines for `model` to `name` instead."""
    names = [source for source, target in mapped.items() if target == model] or [model]
    return [f"--model {name}" if source == "*" else f"--map {source}={name}" for source in names]
