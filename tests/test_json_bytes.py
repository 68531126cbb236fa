import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.json_bytes import Items, dumps, dumps_with_items

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(st.characters(codec=None), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=4), st.lists(VALUES, max_size=4), VALUES)
def test_items_are_written_as_the_list_of_what_they_were(one: list[object], other: list[object], rest: object) -> None:
    texts = [Items([dumps(item) for item in items]) for items in (one, other)]
    written = dumps_with_items({"a": [texts[0], rest], "b": rest, "c": {"d": texts[1]}})
    assert json.loads(written) == json.loads(dumps({"a": [one, rest], "b": rest, "c": {"d": other}}))


@pytest.mark.parametrize("value", [object(), [{"a": {1, object()}}], ["\ud800", object()]])
def test_what_has_no_json_is_refused(value: object) -> None:
    for write in (dumps, dumps_with_items):
        with pytest.raises(TypeError):
            write(value)


def test_a_value_without_items_is_written_as_ever() -> None:
    value = {"text": "né 🙂", "nan": float("nan"), "list": [1, 2.5, None]}
    assert dumps_with_items(value) == dumps(value) == '{"text":"né 🙂","nan":null,"list":[1,2.5,null]}'.encode()
