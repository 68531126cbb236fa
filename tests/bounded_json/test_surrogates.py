import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.bounded_json.strict import first_lone_surrogate, is_text

HALF = "\ud83d"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (HALF, ""),
        ({"messages": [{"role": "user", "content": f"a{HALF}"}]}, "messages[0].content"),
        ({"metadata": {"a": {f"b{HALF}": 1}}}, "metadata.a"),
        ({"tools": [1, {"a b": [HALF]}]}, "tools[1][0]"),
        ({"a": "\U0001f600", "b": ["é", 1, None, True, 0.5]}, None),
    ],
)
def test_the_first_half_of_a_pair_is_found_by_its_path(value: Any, place: str | None) -> None:
    assert first_lone_surrogate(value) == place


@given(st.text(st.characters(codec=None)))
def test_a_text_is_what_utf_8_can_write(value: str) -> None:
    assert is_text(value) == (json.loads(json.dumps(value)).encode(errors="replace").decode() == value)
