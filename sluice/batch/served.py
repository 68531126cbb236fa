"""The models that the lines of a file go to, and those that somebody serves."""

from collections.abc import Collection, Mapping

from sluice.errors import describe_served

_MOST_NAMED = 5


def unserved(models: Mapping[str, int], served: Collection[str]) -> str | None:
    """Say which models of a file nobody serves, and what can be done. `models`: lines by model."""
    missing = sorted(model for model in models if model not in served)
    if not missing:
        return None
    asked = ", ".join(f"{model} ({_lines(models[model])})" for model in missing[:_MOST_NAMED])
    more = f" and {len(missing) - _MOST_NAMED:,} more models" if len(missing) > _MOST_NAMED else ""
    name = next(iter(served)) if len(served) == 1 else "NAME"
    maps = " ".join(f"--map {model}={name}" for model in missing[:_MOST_NAMED])
    way_out = f"Start one, or have the lines served by another model: {maps}"
    return f"no worker serves {asked}{more}, and {describe_served(served)}. {way_out}"


def _lines(count: int) -> str:
    return f"{count:,} line" if count == 1 else f"{count:,} lines"
