"""Generates bodies from the contract's JSON Schema: valid, mutated and damaged ones."""

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from schemas.generate import contract

Schema = dict[str, Any]

_DEFINITIONS: dict[str, Schema] = contract()["$defs"]
_TEXT = st.text(max_size=30)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | _TEXT,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(_TEXT, inside, max_size=4),
    max_leaves=12,
)
_CORNERS: st.SearchStrategy[Any] = st.sampled_from(
    [
        None, True, 0, -1, 2**63, -(2**63) - 1, 10**400, 1.5, -0.0, "", "\x00", "\ud83d", "x" * 5_000, [], {}, [[]],
        {"": {}}, {"$ref": "#"}, ["a"] * 2_000, {str(n): n for n in range(1_200)}, [[[[[[]]]]]], "data:image/png,AAAA",
    ]
)  # fmt: skip
# Bytes that no JSON encoder produces.
_SPLICES = [
    b"NaN", b"-Infinity", b"1e999", b"9" * 5_000, b'"\\ud800"', b'"\\u0000"', b'"\xff"', b"[" * 2_000 + b"]" * 2_000,
    b"[" + b"[]," * 60_000 + b"0]", b'"' + b"\\n" * 100_000 + b'"', b"'a'", b"undefined", b"01", b"1.", b"",
]  # fmt: skip


def values(schema: Schema) -> st.SearchStrategy[Any]:
    """Return a strategy for values that the schema allows. Supports the keywords that the contract uses."""
    if "$ref" in schema:
        return st.deferred(lambda: values(_DEFINITIONS[schema["$ref"].removeprefix("#/$defs/")]))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of(*map(values, options))
    make = _BY_TYPE.get(schema.get("type", ""))
    return make(schema) if make else _JSON


def _strings(schema: Schema) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.from_regex(str(schema["pattern"]), fullmatch=True)
    return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 40), 40))


def _integers(schema: Schema) -> st.SearchStrategy[int]:
    return st.integers(schema.get("minimum", -(2**63)), min(schema.get("maximum", 2**63), 2**63))


def _numbers(schema: Schema) -> st.SearchStrategy[float]:
    above = "exclusiveMinimum" in schema
    lowest = schema.get("exclusiveMinimum", schema.get("minimum"))
    return st.floats(lowest, schema.get("maximum"), exclude_min=above, allow_nan=False, allow_infinity=False)


def _arrays(schema: Schema) -> st.SearchStrategy[list[Any]]:
    most = min(schema.get("maxItems", 4), 4)
    return st.lists(values(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=most)


def _objects(schema: Schema) -> st.SearchStrategy[dict[str, Any]]:
    if patterns := schema.get("patternProperties"):
        ((pattern, inside),) = patterns.items()
        return st.dictionaries(st.from_regex(pattern, fullmatch=True), values(inside), max_size=4)
    named, required = schema.get("properties"), schema.get("required", [])
    if named is None:
        return st.dictionaries(_TEXT, _JSON, max_size=4)
    must = {name: values(named[name]) for name in required}
    may = {name: values(inside) for name, inside in named.items() if name not in required}
    # At most four of the thirty optional fields: with more, most requests would be contradictory.
    some = st.sets(st.sampled_from(sorted(may)), max_size=4) if may else st.just(set[str]())
    return some.flatmap(lambda names: st.fixed_dictionaries({**must, **{name: may[name] for name in names}}))


_BY_TYPE: dict[str, Callable[[Schema], st.SearchStrategy[Any]]] = {
    "string": _strings,
    "integer": _integers,
    "number": _numbers,
    "boolean": lambda schema: st.booleans(),
    "null": lambda schema: st.none(),
    "array": _arrays,
    "object": _objects,
}

REQUESTS = values({"$ref": "#/$defs/Request"})


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """Draw a request in which up to three values are replaced, added or deleted."""
    body = deepcopy(draw(REQUESTS))
    for _ in range(draw(st.integers(1, 3))):
        holder = _somewhere(draw, body)
        places = sorted(holder) if isinstance(holder, dict) else list(range(len(holder)))
        place = draw(st.sampled_from([None, *places]))
        if place is None:
            _put_in(draw, holder)
        elif draw(st.booleans()):
            holder[place] = deepcopy(draw(_CORNERS | _JSON))
        else:
            del holder[place]
    return body


def _put_in(draw: st.DrawFn, holder: Any) -> None:
    value = deepcopy(draw(_CORNERS | _JSON))
    if isinstance(holder, dict):
        holder[draw(_TEXT | st.just("\udfff"))] = value
    else:
        holder.append(value)


def _somewhere(draw: st.DrawFn, body: Any) -> Any:
    holder = body
    while inside := [each for each in _items(holder) if isinstance(each, dict | list)]:
        if draw(st.booleans()):
            break
        holder = draw(st.sampled_from(inside))
    return holder


def _items(holder: Any) -> list[Any]:
    return list(holder.values()) if isinstance(holder, dict) else holder


def _queued(request: Any) -> bytes:
    """Serialize a request as a job in arq's format; NaN and lone surrogates are allowed."""
    return json.dumps({"t": None, "f": "chat", "a": [request], "k": {}, "et": 1}).encode()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draw a queued body that is cut off, or holds bytes that no JSON encoder produces."""
    body = _queued(draw(REQUESTS))
    begin = draw(st.integers(0, len(body)))
    end = draw(st.integers(begin, min(len(body), begin + 20)))
    if draw(st.integers(0, 3)) == 0:
        return body[:begin]
    return body[:begin] + draw(st.sampled_from(_SPLICES) | st.binary(max_size=6)) + body[end:]


BODIES = REQUESTS.map(_queued) | mutated().map(_queued) | _JSON.map(_queued) | damaged()


def bodies(count: int) -> list[bytes]:
    """Return up to `count` different bodies, the same ones in each run."""
    made = dict[bytes, None]()

    @seed(16)
    @settings(
        max_examples=2 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(BODIES)
    def make(body: bytes) -> None:
        made[body] = None

    make()
    return list(made)[:count]
