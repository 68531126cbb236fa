"""Requests that are drawn at random.

What is drawn depends neither on the prompt nor on the engine, whose steps depend on the clock: a sequence can be
run again."""

from collections.abc import Sequence

from hypothesis import strategies as st

from tests.engine.machine.asked import LONGEST_PROMPT, SAMPLINGS, Asked, base
from tests.engine.machine.families import Family, Part
from tests.engine.machine.grammars import Closes, Json, Picky, Plan
from tests.engine.machine.reference import LONGEST
from tests.engine.vision.cases import Prompt
from worker.request import SpecPrefillParams

KEEPS = [0.2, 0.5, 1.0]
PLANS: list[Plan] = [Json(), Picky(), Closes(0), Closes(2), Closes(4), Closes(4, Picky())]
LEAST_SCORED = 60  # tokens of a prompt


def form(data: st.DataObject, prompt: Prompt) -> Asked:
    """Return a request for a prompt."""
    tokens = len(prompt.tokens)
    return Asked(
        prompt,
        data.draw(st.sampled_from(SAMPLINGS), "sampling"),
        data.draw(st.one_of(st.none(), st.sampled_from(PLANS)), "grammar"),
        data.draw(st.integers(1, LONGEST), "most tokens"),
        specprefill(data, tokens),
        data.draw(st.sampled_from(["interactive", "interactive", "batch"]), "lane"),
        data.draw(st.sampled_from(["", "", "", "another"]), "namespace"),
        boundaries(data, tokens),
        data.draw(st.sampled_from([0, 0, None, 2]), "logprobs"),
        data.draw(st.booleans(), "grows"),
    )


def long(data: st.DataObject, family: Family, catalogue: Sequence[tuple[Part, ...]]) -> Asked:
    """Return a request for a long answer to a prompt of which some tokens are dropped."""
    scored = [parts for parts in catalogue if sum(part for part in parts if isinstance(part, int)) >= LEAST_SCORED]
    parts = data.draw(st.sampled_from(scored), "parts")
    seed = data.draw(st.integers(1, 2), "seed")
    whole = base(family, parts, seed, system=data.draw(st.booleans(), "system"))
    tokens = len(whole.tokens)
    keep = data.draw(st.sampled_from(KEEPS[:2]), "keep")
    params = SpecPrefillParams(keep, ((8, tokens - 20),), min_tokens=1, requested=True)
    sampling = data.draw(st.sampled_from(SAMPLINGS), "sampling")
    plan = data.draw(st.sampled_from([None, Closes(3)]), "grammar")
    grows = data.draw(st.booleans(), "grows")
    return Asked(whole, sampling, plan, LONGEST, params, boundaries=boundaries(data, tokens), grows=grows)


def specprefill(data: st.DataObject, tokens: int) -> SpecPrefillParams | None:
    """Return parameters of SpecPrefill for a prompt of `tokens` tokens, or None."""
    keep = data.draw(st.sampled_from([None, *KEEPS]), "keep")
    last = data.draw(st.sampled_from([1, 20]), "last tokens to keep")
    if keep is None or tokens < LEAST_SCORED:
        return None
    return SpecPrefillParams(keep, ((8, tokens - last),), min_tokens=1, requested=True)


def boundaries(data: st.DataObject, tokens: int) -> tuple[int, ...]:
    """Return positions within `tokens` tokens, or at their end."""
    places = st.one_of(st.sampled_from([9, 16, 20, LONGEST_PROMPT]), st.integers(1, LONGEST_PROMPT))
    return tuple({min(at, tokens) for at in data.draw(st.lists(places, max_size=3), "boundaries")})
