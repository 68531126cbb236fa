"""Strategies for arbitrary bodies, and for valid bodies with changes."""

from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

from schemas import ChatRequest
from tests.schemas.bodies import ACCEPTED, FULL

TEXT = st.text(max_size=12)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(TEXT, inside, max_size=3),
    max_leaves=6,
)  # fmt: skip
NAMES = st.sampled_from(sorted(ChatRequest.model_fields)) | TEXT
ANYTHING = JSON | st.dictionaries(NAMES, JSON, max_size=5)


@st.composite
def mutated(draw: st.DrawFn, values: st.SearchStrategy[Any] = JSON, names: st.SearchStrategy[str] = TEXT) -> Any:
    """Draw a valid body with one to three changes: a value, a name, or a missing field."""
    body = deepcopy(draw(st.sampled_from([*ACCEPTED.values(), FULL])))
    for _ in range(draw(st.integers(1, 3))):
        holder = _somewhere(draw, body)
        there = sorted(holder) if isinstance(holder, dict) else list(range(len(holder)))
        step = draw(st.sampled_from([None, *there]))
        if step is not None and draw(st.booleans()):
            del holder[step]
        elif step is not None:
            holder[step] = deepcopy(draw(values))
        elif isinstance(holder, dict):
            holder[draw(names)] = deepcopy(draw(values))
        else:
            holder.append(deepcopy(draw(values)))
    return body


def _somewhere(draw: st.DrawFn, body: Any) -> Any:
    """Return the body, or an object or a list at any depth of it."""
    holder = body
    while inside := [each for each in _items(holder) if isinstance(each, dict | list)]:
        if draw(st.booleans()):
            break
        holder = draw(st.sampled_from(inside))
    return holder


def _items(holder: Any) -> list[Any]:
    return list(holder.values()) if isinstance(holder, dict) else holder
