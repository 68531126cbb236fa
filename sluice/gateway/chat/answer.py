"""Joins the answers of several jobs into one completion. Pure functions over OpenAI's objects."""

from collections.abc import Mapping, Sequence
from typing import Any

from sluice.cancellation import Outcome

Usage = Mapping[str, Any]


def completion_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one completion with a choice for each result; one result is returned unchanged."""
    first = dict(results[0])
    if len(results) == 1:
        return first
    choices = [{**result["choices"][0], "index": index} for index, result in enumerate(results)]
    ours = {"choices": [result.get("sluice") for result in results]}
    return {**first, "choices": choices, "usage": total_usage([result["usage"] for result in results]), "sluice": ours}


def outcome_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of cancelling all choices: "requested" while one runs, "ended" if all had ended before."""
    order: Sequence[Outcome] = ("requested", "cancelled", "ended")
    return next(outcome for outcome in order if outcome in outcomes)


def total_usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Return the usage of all choices: the prompt's of the first, since it is the same, and the sum of the rest."""
    first = dict(usages[0])
    if len(usages) == 1:
        return first
    completion = sum(usage["completion_tokens"] for usage in usages)
    details = _sums([usage.get("completion_tokens_details") or {} for usage in usages])
    total = {"completion_tokens": completion, "total_tokens": first["prompt_tokens"] + completion}
    return {**first, **total, **({"completion_tokens_details": details} if details else {})}


def _sums(counts: Sequence[Usage]) -> dict[str, Any]:
    names = dict.fromkeys(name for each in counts for name in each)
    return {name: sum(each.get(name) or 0 for each in counts) for name in names}
