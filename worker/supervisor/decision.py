"""The plan of several models on one machine: each one's share of the memory, and which to load and to unload."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice.log_lines import LogFormat

# Seconds that a job waits, and that a model with jobs is loaded at least, before it makes room for that job: a load and
# the prompts of resumed jobs, which are computed again, take some seconds of a turn.
PATIENCE_S, TURN_S = 10.0, 30.0


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model, its share of the memory, and the settings of its worker."""

    name: str
    path: str  # a folder, or a hub id
    nbytes: int  # its share: weights, rows and caches
    weights: int  # bytes of these that are weights
    idle_unload_s: float | None = None  # None: never
    queue_limit: int = 10_000
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables of its worker; the URL is among them


@dataclass(frozen=True, slots=True)
class Plan:
    """What all models together may take, and each one's share of it."""

    redis_url: str = field(repr=False)
    log_level: str
    log_format: LogFormat
    budget: int  # bytes
    models: tuple[PlannedModel, ...]

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> "Plan":
        """Return the plan that was written as JSON."""
        return cls(**{**written, "models": tuple(PlannedModel(**each) for each in written["models"])})


@dataclass(frozen=True, slots=True)
class Demand:
    """Memory of a model in bytes."""

    least: int  # with which it serves a row of usual length
    given: int | None = None  # its share, if the operator has chosen it


def shares(demands: Sequence[Demand], budget: int) -> list[int]:
    """Return each model's share of the budget in bytes. As many of the largest models as fit together divide the budget
    in proportion to what each needs at least, so any as many of them fit, and of the small ones more. None needs
    more than the budget."""
    sizes = [demand.given or demand.least for demand in demands]
    together = list[int]()
    for each in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if sizes[each] + sum(sizes[i] for i in together) > budget:
            break
        together.append(each)
    given = sum(demands[i].given or 0 for i in together)
    least = sum(demands[i].least for i in together if demands[i].given is None)
    if not least:  # the given shares leave no room, so each of the others gets what it needs
        return sizes
    divided = max(budget - given, least)  # in the proportion divided : least
    return [demand.given or min(budget, demand.least * divided // least) for demand in demands]


@dataclass(frozen=True, slots=True)
class Situation:
    """A model, as far as memory is concerned. Times are in seconds of one clock."""

    name: str
    nbytes: int  # its share
    in_memory: bool  # it has a process
    loaded: bool = False  # its process serves, and is not asked to end
    leaving: bool = False  # its process is asked to end
    # Of its oldest job that no worker has, or of the command to load it; not before its last turn ended.
    waits_since: float | None = None
    wanted: bool = False  # is to be loaded if there is room
    ready_at: float = 0.0  # it is not loaded before, since its process died
    busy: bool = False  # it has jobs
    used_at: float = 0.0  # last time that it had jobs, or that its load began
    loaded_at: float = 0.0
    idle_unload_s: float | None = None  # None: never


@dataclass(frozen=True, slots=True)
class Decision:
    """Names of models."""

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()


def decide(models: Sequence[Situation], budget: int, now: float) -> Decision:
    """Return which models to load and to unload now. The shares of all that are in memory never exceed the budget. Jobs
    that wait longest come first; idle models make room, the least recently used first, then such with jobs that have
    been loaded for `TURN_S`, if a job has waited for `PATIENCE_S`."""
    load = list[str]()
    unload = [each.name for each in models if _is_idle_too_long(each, now)]
    free = budget - sum(each.nbytes for each in models if each.in_memory)
    coming = sum(each.nbytes for each in models if each.leaving or each.name in unload)
    for each in _in_need(models, now):
        lack = each.nbytes - free - coming
        leaving = _victims(models, unload, lack, now - (each.waits_since or now), now) if lack > 0 else []
        if leaving is None:
            if now - (each.waits_since or now) >= PATIENCE_S:
                return Decision(tuple(load), tuple(unload))  # or models that need less would keep it out for ever
            continue
        unload += [victim.name for victim in leaving]
        coming += sum(victim.nbytes for victim in leaving)
        if each.nbytes <= free:
            load.append(each.name)
            free -= each.nbytes
        else:
            coming -= each.nbytes - free
            free = 0
    for each in models:
        if each.wanted and each.name not in load and _can_load(each, now) and each.nbytes <= free:
            load.append(each.name)
            free -= each.nbytes
    return Decision(tuple(load), tuple(unload))


def _is_idle_too_long(model: Situation, now: float) -> bool:
    if model.idle_unload_s is None or not model.loaded or model.busy:
        return False
    return now - max(model.used_at, model.loaded_at) >= model.idle_unload_s


def _can_load(model: Situation, now: float) -> bool:
    return not model.in_memory and now >= model.ready_at


def _in_need(models: Iterable[Situation], now: float) -> list[Situation]:
    needing = [each for each in models if each.waits_since is not None and _can_load(each, now)]
    return sorted(needing, key=lambda each: each.waits_since or 0.0)


def _victims(
    models: Iterable[Situation], unload: Sequence[str], lack: int, waited_s: float, now: float
) -> list[Situation] | None:
    """Return models that free `lack` bytes when they leave; None if those that may leave do not suffice."""
    able = [each for each in models if each.loaded and each.name not in unload]
    idle = sorted((each for each in able if not each.busy), key=lambda each: each.used_at)
    had_turn = (each for each in able if each.busy and now - each.loaded_at >= TURN_S)
    busy = sorted(had_turn, key=lambda each: each.loaded_at) if waited_s >= PATIENCE_S else []
    chosen = list[Situation]()
    for each in [*idle, *busy]:
        if sum(victim.nbytes for victim in chosen) < lack:
            chosen.append(each)
    if sum(victim.nbytes for victim in chosen) < lack:
        return None
    for each in [*chosen]:  # the last one may free enough without earlier ones
        if sum(victim.nbytes for victim in chosen) - each.nbytes >= lack:
            chosen.remove(each)
    return chosen
