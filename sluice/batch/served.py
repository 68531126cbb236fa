"""The models that the lines of a file go to, and those that somebody serves."""

from collections.abc import Collection, Mapping

from sluice.errors import describe_served
from sluice.wording import counted

_MOST_NAMED = 5


def unserved(models: Mapping[str, int], served: Collection[str], mapped: Mapping[str, str]) -> str | None:
    """Say which models of a file nobody serves, and what can be done. `models`: lines by model, as `mapped`."""
    missing = sorted(model for model in models if model not in served)
    if not missing:
        return None
    asked = ", ".join(f"{model} ({counted(models[model], 'line')})" for model in missing[:_MOST_NAMED])
    more = f" and {counted(len(missing) - _MOST_NAMED, 'more model')}" if len(missing) > _MOST_NAMED else ""
    name = next(iter(served)) if len(served) == 1 else "NAME"
    maps = " ".join(option for model in missing[:_MOST_NAMED] for option in _options(model, name, mapped))
    way_out = f"Start one, or have the lines served by another model: {maps}"
    return f"no worker serves {asked}{more}, and {describe_served(served)}. {way_out}"


def unused(mapped: Mapping[str, str], asked: Collection[str]) -> str | None:
    """Say which names of the mapping no line of the file has."""
    names = [name for name in mapped if name != "*" and name not in asked]
    if not names:
        return None
    maps = " ".join(f"--map {name}={mapped[name]}" for name in names[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return f"{maps}{more}: no line of the file names such a model"


def _options(model: str, name: str, mapped: Mapping[str, str]) -> list[str]:
    """The options that lead to `name` what goes to `model` now, be it mapped or named so in the file."""
    theirs = [asked for asked, target in mapped.items() if target == model] or [model]
    return [f"--model {name}" if asked == "*" else f"--map {asked}={name}" for asked in theirs]
