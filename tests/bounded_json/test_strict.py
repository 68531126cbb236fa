import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.bounded_json.strict import NotJson, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**300), 10**300) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
)  # fmt: skip


def sentence(raw: bytes) -> str:
    with pytest.raises(NotJson) as raised:
        loads(raw)
    return str(raised.value)


@given(VALUES, st.booleans())
def test_whatever_json_writes_is_read_as_it_was(value: Any, ascii_only: bool) -> None:
    assert loads(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_a_name_that_json_does_not_have_is_said_again(name: str) -> None:
    said = sentence(b'{"temperature": ' + name.encode() + b"}")
    assert name in said
    assert "serializer" not in said


@pytest.mark.parametrize(
    ("digits", "said_again"),
    [("1e999", "1e999"), ("-2E400", "-2E400"), ("1" * 400 + ".5", "1111111111..."), ("1" * 90 + "e999", "...e999")],
)
def test_a_number_that_no_float_can_hold_is_said_again_in_short(digits: str, said_again: str) -> None:
    said = sentence(f"[{digits}]".encode())
    assert said_again in said
    assert "serializer" not in said
    assert len(said) < 120


def test_a_whole_number_of_too_many_digits_is_refused_by_their_number() -> None:
    assert loads(b"9" * 4300) == 10**4300 - 1
    said = sentence(b"9" * 5000)
    assert "5,000 digits" in said
    assert "4,300" in said
    assert "serializer" not in said


def test_what_is_nested_too_deeply_is_told_so() -> None:
    assert "nested too deeply" in sentence(b"[" * 50_000 + b"]" * 50_000)


@pytest.mark.parametrize(
    "raw", [b"", b"hello", b'"\xff"', b"\x80\x04K\x01.", b"[1,]", b'{"a":1', b'"\n"', b"\xef\xbb\xbf{}"]
)
def test_what_is_not_json_at_all_names_the_serializer(raw: bytes) -> None:
    assert "job_serializer" in sentence(raw)
