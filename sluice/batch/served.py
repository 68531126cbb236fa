"""The models that the lines of a file go to, and those that somebody serves."""

from collections.abc import Collection, Mapping
from functools import partial

from redis.asyncio import Redis

from sluice import wire
from sluice.retries import Retries

_MOST_NAMED = 5


async def served_models(redis: Redis, retries: Retries) -> set[str]:
    """Waits out an outage."""
    names, cursor = set[bytes](), None
    while cursor != 0:
        cursor, found = await retries.ride_out(partial(redis.scan, cursor or 0, match=wire.WORKERS, count=1000))
        names.update(found)
    said = [await retries.ride_out(partial(redis.hget, name.decode(), "model")) for name in names]
    return {model.decode() for model in said if model}


def unserved(models: Mapping[str, int], served: Collection[str]) -> str | None:
    """Say which models of a file nobody serves, and what can be done. `models`: lines by model."""
    missing = sorted(model for model in models if model not in served)
    if not missing:
        return None
    asked = ", ".join(f"{model} ({_lines(models[model])})" for model in missing[:_MOST_NAMED])
    more = f" and {len(missing) - _MOST_NAMED:,} more models" if len(missing) > _MOST_NAMED else ""
    there = f"there are workers for {', '.join(sorted(served))}" if served else "no worker is alive"
    name = next(iter(served)) if len(served) == 1 else "NAME"
    maps = " ".join(f"--map {model}={name}" for model in missing[:_MOST_NAMED])
    return f"no worker serves {asked}{more}, and {there}. Start one, or have the lines served by another model: {maps}"


def _lines(count: int) -> str:
    return f"{count:,} line" if count == 1 else f"{count:,} lines"
