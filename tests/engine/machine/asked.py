"""Requests of the machine, and what each must answer."""

from dataclasses import dataclass
from functools import cache

from sluice.contract.keys import Lane
from tests.engine.machine import grammars
from tests.engine.machine.families import Family, Part, joined, prompt
from tests.engine.machine.faults import NOT_FINITE, REFUSED, Faults
from tests.engine.machine.grammars import Forbids, Forces, Plan, Raises
from tests.engine.machine.reference import LONGEST, SHORT, Answer, alone
from tests.engine.vision.cases import Prompt
from worker.request import Range, Sampling, SpecPrefillParams

SYSTEM: tuple[Part, ...] = (20,)
TEXTS: list[tuple[Part, ...]] = [(1,), (9,), (16,), (40,), (70,), (100,)]
LOOKS: list[tuple[Part, ...]] = [
    (5, (1, 24, 16), 9),
    (5, (2, 24, 16), 9),  # differs from the first in its image only
    (4, (2, 32, 16), 6, (3, 16, 16), 11),
    (30, (1, 32, 24), 34, (2, 24, 16), 30),
]
SPOILT: list[tuple[Part, ...]] = [(5, (1, 24, 16), 3, REFUSED, 9), (5, NOT_FINITE, 9)]
LONGEST_PROMPT = 150

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=6),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.5),
    Sampling(temperature=1.2, min_p=0.05, presence_penalty=1.0, seed=7),
]


@dataclass(frozen=True)
class Asked:
    """A request, apart from its state."""

    prompt: Prompt
    sampling: Sampling
    grammar: Plan | None
    max_tokens: int
    specprefill: SpecPrefillParams | None = None
    lane: Lane = "interactive"
    namespace: str = ""
    boundaries: tuple[int, ...] = ()
    top_logprobs: int | None = 0
    grows: bool = False


@cache
def base(family: Family, parts: tuple[Part, ...], seed: int, *, system: bool) -> Prompt:
    """Return a prompt; some share their first tokens."""
    own = prompt(family, *parts, seed=seed)
    return joined(prompt(family, *SYSTEM, seed=1), own) if system else own


def answer_to(family: Family, asked: Asked, kept: tuple[Range, ...] | None) -> Answer:
    """Return the whole answer of a request alone. `kept`: the tokens of its prompt that are computed; None: all."""
    plan = grammars.without_failure(asked.grammar)
    tokens = SHORT if asked.max_tokens <= SHORT else LONGEST
    return alone(family, asked.prompt, asked.sampling, plan, kept, tokens)[: asked.max_tokens]


def is_spoilt(faults: Faults, prompt: Prompt) -> bool:
    """Return True if a token or an image of the prompt makes a request fail."""
    return faults.spoils(prompt) or (faults.content and bool({*prompt.tokens} & {*faults.tokens}))


def fails_alone(faults: Faults, asked: Asked) -> bool:
    """Return True if the request may fail for its content."""
    return isinstance(asked.grammar, Raises | Forbids | Forces) or is_spoilt(faults, asked.prompt)


def fails_at(
    faults: Faults, asked: Asked, answer: list[int], kept: tuple[Range, ...] | None, *, last_fed: bool, known: bool
) -> int | None:
    """Return the number of tokens that a request delivers before it fails for its content; None if it does not.
    `last_fed`: the token at its limit is fed, beside rows that decode on. `known`: each token is delivered before it is
    fed, as after a verification of drafts, or if prompts are computed next."""
    if known:
        return _fails_after_delivery(faults, asked, answer, kept)
    most_fed = asked.max_tokens if last_fed else asked.max_tokens - 1
    places = _bad_places(faults, asked, answer, kept, most_fed) if faults.content else []
    match asked.grammar:
        # A token is fed, and the next one constrained, before it is delivered; so is the end.
        case Raises(at) if at <= min(most_fed, len(answer) + 1):
            places.append(max(0, at - 1))
        case Forbids(at) if at < asked.max_tokens and at <= len(answer):
            places.append(at)
    return min(places, default=None)


def _fails_after_delivery(
    faults: Faults, asked: Asked, answer: list[int], kept: tuple[Range, ...] | None
) -> int | None:
    places = [0] if faults.content and _is_prompt_bad(faults, asked, kept) else []
    if faults.content:
        places += [at + 1 for at, token in enumerate(answer) if token in (faults.raising, faults.not_finite)]
    if isinstance(asked.grammar, Raises | Forbids) and asked.grammar.at <= len(answer):
        places.append(asked.grammar.at)
    return min((place for place in places if place < asked.max_tokens), default=None)


def _bad_places(
    faults: Faults, asked: Asked, answer: list[int], kept: tuple[Range, ...] | None, most_fed: int
) -> list[int]:
    places = [0] if _is_prompt_bad(faults, asked, kept) else []
    places += [at for at, token in enumerate(answer[:most_fed]) if token == faults.raising]
    delivered = [at + 1 for at, token in enumerate(answer) if token == faults.not_finite]
    return places + [at for at in delivered if at < asked.max_tokens]


def _is_prompt_bad(faults: Faults, asked: Asked, kept: tuple[Range, ...] | None) -> bool:
    kept = kept or ((0, len(asked.prompt.tokens)),)
    computed = {token for start, end in kept for token in asked.prompt.tokens[start:end]}
    return bool(computed & {faults.raising, faults.not_finite}) or faults.spoils(asked.prompt)
