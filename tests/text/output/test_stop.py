import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.selection import examples
from worker.text.output.output import StopStrings

LETTERS = "ab🙂"  # few, so that stop strings overlap with the text and with each other
TEXTS = st.text(LETTERS, max_size=12)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)


def said(stops: Iterable[str], pieces: Iterable[str]) -> tuple[str, str | None]:
    """Return the whole output, and the stop string that ended it."""
    strings = StopStrings(list(stops))
    out = "".join([strings.feed(piece) for piece in pieces])
    return out + strings.flush(), strings.matched


def by_hand(stops: Iterable[str], text: str) -> tuple[str, str | None]:
    """Character by character: the stop string that is complete first ends the answer where it began."""
    for end in range(1, len(text) + 1):
        if begins := [end - len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: min(begins)], text[min(begins) : end]
    return text, None


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


CUTS = st.lists(st.integers(0, 99), max_size=12)


@given(STOPS, TEXTS, CUTS)
def test_the_output_does_not_depend_on_how_the_text_is_cut(stops: list[str], text: str, places: list[int]) -> None:
    assert said(stops, cut(text, places)) == said(stops, [text]) == said(stops, text)


@example(["aba", "b"], "aba", [])
@example(["b", "ab"], "aab", [])
@settings(max_examples=examples(400))
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
    assert said(["b", "ab"], ["xab"]) == ("x", "ab")


def test_one_that_is_complete_first_wins_over_one_that_began_first() -> None:
    assert said(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")


class Searched:
    """The definition of `StopStrings`: searches all held text for each piece."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.stopped = stops, "", False

    def feed(self, text: str) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + text, ""
        if ends := [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stops if stop in text]:
            self.stopped = True
            return text[: min(ends)[1]]
        starts = {stop[:length] for stop in self._stops for length in range(1, len(stop))}
        keep = max((length for length in range(1, len(text) + 1) if text[-length:] in starts), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


LONG_STOPS = st.lists(st.text("ab", min_size=1, max_size=9), max_size=5)
PIECES = st.lists(st.none() | st.text("ab", max_size=5), max_size=30)  # None: a marker, where no stop string continues


def each(strings: StopStrings | Searched, pieces: Iterable[str | None]) -> list[tuple[str, bool]]:
    """Return the text that each piece releases."""
    return [(strings.flush() if piece is None else strings.feed(piece), strings.stopped) for piece in pieces]


@settings(max_examples=examples(400))
@given(LONG_STOPS, PIECES)
def test_each_piece_returns_what_a_search_of_all_held_text_returns(stops: list[str], pieces: list[str | None]) -> None:
    pieces.append(None)
    assert each(StopStrings(stops), pieces) == each(Searched(stops), pieces)


@given(LONG_STOPS, PIECES, st.integers(0, 30))
def test_a_replay_of_the_first_pieces_continues_as_the_unbroken_text(
    stops: list[str], pieces: list[str | None], at: int
) -> None:
    pieces.append(None)
    replayed = StopStrings(stops)
    each(replayed, pieces[:at])
    assert each(replayed, pieces[at:]) == each(Searched(stops), pieces)[at:]


def test_the_cost_of_a_token_does_not_grow_with_the_held_text_or_the_stop_strings() -> None:
    stops = ["assistant" * 10_000, *(letter * 1024 for letter in "abcdefghijklmno")]
    strings, began = StopStrings(stops), time.process_time()
    assert not any(strings.feed("assistant") for _ in range(9_999))
    assert time.process_time() - began < 2  # a search of the held text takes far longer
    assert strings.feed("!") == "assistant" * 9_999 + "!"
