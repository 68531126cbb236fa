from collections.abc import Iterable
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from worker.text.output.stop import StopStrings

LETTERS = "ab🙂"  # few, so that stop strings overlap with the text and with each other
TEXTS = st.text(LETTERS, max_size=12)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)


def said(stops: Iterable[str], pieces: Iterable[str]) -> tuple[str, bool]:
    """The whole output, and whether a stop string ended it."""
    strings = StopStrings(list(stops))
    out = "".join([strings.feed(piece) for piece in pieces])
    return out + strings.flush(), strings.stopped


def by_hand(stops: Iterable[str], text: str) -> tuple[str, bool]:
    """Character by character: the stop string that is complete first ends the answer where it began."""
    for end in range(1, len(text) + 1):
        if begins := [end - len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: min(begins)], True
    return text, False


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


CUTS = st.lists(st.integers(0, 99), max_size=12)


@given(STOPS, TEXTS, CUTS)
def test_the_output_does_not_depend_on_how_the_text_is_cut(stops: list[str], text: str, places: list[int]) -> None:
    assert said(stops, cut(text, places)) == said(stops, [text]) == said(stops, text)


@example(["aba", "b"], "aba", [])
@example(["b", "ab"], "aab", [])
@settings(max_examples=400)
@given(STOPS, TEXTS, CUTS)
def test_the_output_is_what_one_finds_by_hand(stops: list[str], text: str, places: list[int]) -> None:
    assert said(stops, cut(text, places)) == by_hand(stops, text)


@given(STOPS, TEXTS, CUTS)
def test_a_stop_string_is_never_let_out(stops: list[str], text: str, places: list[int]) -> None:
    out, _ = said(stops, cut(text, places))
    assert [stop for stop in stops if stop in out] == []


@given(TEXTS, CUTS)
def test_nothing_is_dropped_or_held_back_where_there_is_no_stop_string(text: str, places: list[int]) -> None:
    strings, pieces = StopStrings([]), cut(text, places)
    assert [strings.feed(piece) for piece in pieces] == pieces
    assert strings.flush() == ""


@given(STOPS, TEXTS)
def test_only_what_may_become_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    strings = StopStrings(stops)
    out = strings.feed(text)
    if not strings.stopped:
        held = text[len(out) :]
        starts = {stop[:n] for stop in stops for n in range(1, len(stop))}
        assert held == max((text[-n:] for n in range(1, len(text) + 1) if text[-n:] in starts), key=len, default="")


def test_nothing_comes_after_a_stop_string() -> None:
    strings = StopStrings(["END"])
    assert [strings.feed(piece) for piece in ("one E", "ND two", "three", "END")] == ["one ", "", "", ""]
    assert strings.flush() == ""


def test_of_two_that_end_together_the_longer_one_is_cut() -> None:
    assert said(["b", "ab"], ["xab"]) == ("x", True)


def test_one_that_is_complete_first_wins_over_one_that_began_first() -> None:
    assert said(["abcd", "bc"], ["xabcd"]) == ("xa", True)
