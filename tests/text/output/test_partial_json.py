import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.text.output.partial_json import PartialJson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)
WRITTEN = st.builds(
    lambda value, ascii_, indent: json.dumps(value, ensure_ascii=ascii_, indent=indent),
    OBJECTS,
    st.booleans(),
    st.sampled_from([None, 0, 2]),
)


def members(pieces: list[str]) -> tuple[PartialJson, dict[str, str]]:
    reader, found = PartialJson(), dict[str, str]()
    for piece in pieces:
        for member in reader.feed(piece):
            found[member.key] = found.get(member.key, "") + member.text
    return reader, found


def is_object(text: str) -> bool:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


def doubled(text: str) -> bool:
    """True if the outermost object has a member twice."""
    keys: list[list[str]] = []
    json.loads(text, object_pairs_hook=lambda pairs: keys.append([key for key, _ in pairs]))
    return len(set(keys[-1])) < len(keys[-1])


@given(WRITTEN)
def test_a_members_text_is_its_value(text: str) -> None:
    value = json.loads(text)
    for pieces in ([text], list(text)):
        reader, found = members(pieces)
        assert {key: json.loads(more) for key, more in found.items()} == {
            key: one for key, one in value.items() if isinstance(one, str | list | dict)
        }
        assert reader.complete_members == set(value)
        assert not reader.broken


@given(WRITTEN, st.integers(0, 99))
def test_what_has_come_so_far_is_the_beginning_of_the_whole(text: str, end: int) -> None:
    (so_far, found), (_, whole) = members([text[:end]]), members([text])
    assert not so_far.broken
    assert all(whole[key].startswith(more) for key, more in found.items())


@example('{"a": 01}', 0, "")
@example('{"a": "\\x"}', 0, "")
@example('{"a": "\\u12g4"}', 0, "")
@example('{"a": 1.}', 0, "")
@example('{"a": -}', 0, "")
@example('{"a": tru}', 0, "")
@example('{"a": [1,]}', 0, "")
@example('{"a": {,}}', 0, "")
@example('{"a" 1}', 0, "")
@example('{"a": [}', 0, "")
@example('{"a": "\t"}', 0, "")
@example('{"a": 1}}', 0, "")
@example("[]", 0, "")
@example('{"a": 1e5, "b": -0.5E-7}', 0, "")
@example('{"a": "x", "a": "y"}', 0, "")
@given(WRITTEN, st.integers(0, 99), st.text('{}[]",:\\ 01.e-tfn\n\x01é', max_size=2))
def test_it_is_as_strict_as_the_standard(text: str, at: int, junk: str) -> None:
    text = text[:at] + junk + text[at:]
    reader, _ = members([text + " "])
    complete = not reader.broken and reader._expects == "nothing"
    assert complete == (is_object(text) and not doubled(text))


@pytest.mark.parametrize("end", ['x"y":2}', "}", "]"])
def test_it_says_no_more_once_it_is_broken(end: str) -> None:
    reader, found = members(['{"a": {"b": 1', "]"])
    assert (reader.broken, found) == (True, {"a": '{"b": 1'})
    assert reader.feed(end) == []
