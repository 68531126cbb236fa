import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from worker.bounded_json.strict import MAX_BODY_VALUES, count_values, is_expensive

TEXT = st.text(st.sampled_from('a"\\,[{é\n') | st.characters(codec="utf-8"), max_size=30)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inside: st.lists(inside, max_size=5) | st.dictionaries(TEXT, inside, max_size=5),
)


def counted(value: Any) -> int:
    """Commas and opening brackets, one by one."""
    if not isinstance(value, list | dict):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(map(counted, items))


@given(VALUES, st.booleans(), st.integers(0, 70))
def test_what_strings_hold_is_not_counted_wherever_the_slices_are(value: Any, ascii_only: bool, before: int) -> None:
    # With so much before it, the value lies across the end of the first slice.
    body = json.dumps(["x" * (65_536 - before), value], ensure_ascii=ascii_only).encode()
    assert count_values(body) == counted(["", value])


@given(TEXT.filter(bool), st.integers(1, 40))
def test_a_string_across_many_slices_is_one_string(piece: str, thousands: int) -> None:
    body = json.dumps([piece * (1000 * thousands), {}], ensure_ascii=False).encode()
    assert count_values(body) == 3


def test_a_run_of_backslashes_across_slices_ends_no_string() -> None:
    for extra in range(4):
        body = json.dumps(["a" * extra + "\\" * 100_000 + '"', ","]).encode()
        assert count_values(body) == 2


def test_a_string_that_never_ends_hides_nothing_that_is_read() -> None:
    assert count_values(b'[1,"' + b'\\",' * 100_000) == 2


def test_small_and_plain_bodies_are_not_dear() -> None:
    assert not is_expensive(b'{"messages":[{"role":"user","content":"' + b"a, b and c. " * 5_000 + b'"}]}')
    assert not is_expensive(b'"' + b"a" * 16_000_000 + b'"')
    assert not is_expensive('"é"'.encode() * 1000)


def test_many_values_many_escapes_and_large_wide_text_are_dear() -> None:
    assert is_expensive(b"[" + b"0," * (MAX_BODY_VALUES + 1))
    assert is_expensive(b"[]" * (MAX_BODY_VALUES + 1))
    assert is_expensive(b"{}" * (MAX_BODY_VALUES + 1))
    assert is_expensive(b'"' + b"\\n" * 1_100_000 + b'"')
    assert is_expensive(b'"' + b"a" * 5_000_000 + "é".encode() + b'"')
