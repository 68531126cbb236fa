"""A string of an answer matches its pattern by Python's expressions, and is JSON."""

import json
import re
import unicodedata

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.selection import examples
from tests.text.grammar.schema.answers import answers, takes
from worker.errors import JobFailure
from worker.text.grammar.sandbox import Uncompilable
from worker.text.grammar.schema.patterns import Pattern, pattern_steps
from worker.text.grammar.schema.regex import UnsupportedPattern, character_class


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^[\x00-\x1f]$", ["\n", "\t", "\b"], ['"', "\\", "a"]),
        (r"^[\u0000-\u001F]$", ["\r"], ['"', "\\"]),
        (r'^[^"]*$', ["", "a\\b", "\n"], ['"', 'a"b']),
        (r"^[^\\]*$", ["", 'a"b'], ["\\", "a\\n"]),
        (r'^[^"\n]$', ["a", "\\"], ['"', "\n"]),
        (r"^[\x00-\x09\x0b-\x1f]$", ["\t"], ["\n", '"', "\\"]),
        (r"^\s$", [" ", "\n"], ['"', "\\", "\x0b"]),
        (r"^\W$", ['"', "\\", "-", "\u2014"], ["a", "é", "_"]),
        (r"^[^\w]$", ["-"], ["é", "a"]),
        (r"^.$", ['"', "a", "é"], ["\n", "\r", "\u2028", ""]),
        (r"^[\d]$", ["5"], ["\u0665", "a"]),
        (r"^(?P<stop>a)b$", ["ab"], ["a", "b"]),
        (r"^(?<name>a)b$", ["ab"], ["a"]),
        (r"a|^b$", ["xax", "b"], ["xb", "c"]),
        (r"(^|,)x(,|$)", ["x", "a,x", "x,a", "a,x,b"], ["ax", "xa"]),
        (r"^a$|^b", ["a", "bc"], ["ac", "ab"]),
        (r"^(?:^a)?b", ["ab", "b"], ["aab", "a"]),
        (r"^\ud83d\ude00$", ["😀"], ["", "a"]),
        (r"^\u{1F600}$", ["😀"], ["u"]),
        (r"^[\p{L}]+$", ["é", "a"], ["5", '"']),
        (r'^[^\p{L}"]$', ["5"], ["é", '"']),
        (r"^\P{L}$", ["5", '"'], ["a"]),
        (r"^$", [""], ["a", "\n"]),
        (r"^a{2,3}?$", ["aa", "aaa"], ["a", "aaaa"]),
        (r"^[a\-z/]\/$", ["-/", "a/", "//"], ["b/"]),
        (r"^[]\]a]$", [], []),
    ],
)
def test_a_pattern_means_what_json_schema_says(pattern: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern}
    if not good:
        with pytest.raises(JobFailure):
            takes(schema, "")
    for text in good:
        assert takes(schema, json.dumps(text, ensure_ascii=False)), text
    for text in bad:
        assert not takes(schema, json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)b", "(?!a)b", "(?<=a)b", r"(a)\1", r"\ba", "a^b", "b$c", "(^a)*", "[", "[a-", "(a", "a)", "*a", "a**",
        "a{,3}", "{", r"\A", r"\Z", r"\ca", "[z-a]", r"[\d-z]", "[]", "[^]", "[[:alpha:]]", "(?i)a", "(?i:a)", "(?P=a)",
        "(?>a)", "a++", "a{3,2}", "a{2}{3}", "^*", "(" * 50 + ")" * 50, "(^|a)" * 12, "a" * 5000, r"\W" * 100, "\\",
        r"\u{110000}", "a{9999999}",
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_be_held_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(JobFailure) as refused:
        takes({"properties": {"a": {"pattern": pattern}}}, "")
    assert refused.value.type == "invalid_request"
    assert refused.value.message.startswith("response_format: #/properties/a/pattern: the pattern ")


SINGLE = [
    "a", "Z", "5", "é", "😀", '"', "/", "-", "_", "%", ",", r"\\", r"\n", r"\t", r"\.", r"\-", r"\/", r"\x41", r"\x00",
    r"\x1f", r"\u00e9", r"\u0000", r"\u2028", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\"", r"\]", r"\^",
]  # fmt: skip
RANGES = [r"\x00-\x1f", "a-z", " -~", r"\x00-\x7f", r"\u0000-\uffff", "!-/", r"\x08-\x0d", r"0-9", "é-ü", r"\t-\r"]
CLASSES = st.builds(
    lambda negated, parts: f"[{'^' if negated else ''}{''.join(parts)}]",
    st.booleans(),
    st.lists(st.sampled_from([*SINGLE, *RANGES]), min_size=1, max_size=3),
)
ATOMS = st.one_of(st.sampled_from([*SINGLE, "."]), CLASSES)
FEW = st.sampled_from(["", "", "?", "{2}", "{0,2}?"])  # more, and Python's own take for ever
COUNTS = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,}", "{0,2}", "*?", "+?"])


def _combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds(
        lambda opening, body, times: f"{opening}{body}){times}", st.sampled_from(["(", "(?:"]), inner, FEW
    )
    sequence = st.lists(st.one_of(group, inner), min_size=1, max_size=3).map("".join)
    return st.one_of(sequence, st.builds("{}|{}".format, inner, inner))


BODIES = st.recursive(st.builds("{}{}".format, ATOMS, COUNTS), _combined, max_leaves=6)
ANCHORED = st.builds(
    lambda body, start, end: start + body + end, BODIES, st.sampled_from(["", "^"]), st.sampled_from(["", "$"])
)
PATTERNS = st.one_of(
    ANCHORED, st.builds("({}|{}){}".format, ANCHORED, ANCHORED, BODIES), st.builds("{}|{}".format, ANCHORED, ANCHORED)
)


@settings(deadline=None, max_examples=examples(100))
@given(pattern=PATTERNS, seed=st.integers(0, 99))
def test_whatever_a_pattern_allows_matches_it_and_is_json(pattern: str, seed: int) -> None:
    schema = {"type": "string", "pattern": pattern}
    try:
        written = answers(schema, 3, seed, max_bytes=24)  # Python's expressions take for ever over long ones
    except (JobFailure, Uncompilable):
        return
    for text in written:
        assert re.search(pattern, json.loads(text)), (pattern, text)


@settings(deadline=None, max_examples=examples(100))
@given(pattern=PATTERNS, text=st.text(st.sampled_from('aZ5é"/-_,\n\t\\ %\u2028'), max_size=5))
def test_a_name_that_is_compared_with_a_pattern_matches_by_python_too(pattern: str, text: str) -> None:
    try:
        matches = Pattern(pattern).matches(text)
    except UnsupportedPattern:
        assume(False)
    if matches:
        assert re.search(pattern, text)
    elif not re.search(r"[.\\]", pattern):  # nothing that the dialects read differently
        assert not re.search(pattern, text) or (text.endswith("\n") and "$" in pattern)


@pytest.mark.parametrize(
    ("pattern", "least"),
    [
        ("[a-z]{1,255}", "[a-z]"),
        ("x*y+z?", "y"),
        ("^a[a-z]*", "^a"),
        ("[a-z]{2,9}$", "[a-z]{2}$"),
        ("(ab*){3}", "ab*ab*a"),
        ("(a|bc{2,5}|d+)", "a|bcc|d"),
        ("a|b*", ""),
        ("^[a-z]{1,255}$", "^[a-z]{1,255}$"),
        ("^(a|b{2,5})$|c+", "^(a|b{2,5})$|c"),
    ],
)
def test_a_count_at_an_open_end_costs_what_its_least_does(pattern: str, least: str) -> None:
    flat = re.compile(r"\(\?:|\)|\{1,1\}")
    assert flat.sub("", expanded(Pattern(pattern).whole())) == flat.sub("", expanded(Pattern(least).whole()))


def expanded(expression: str) -> str:
    """Return the expression with [x]{2,2} as [x][x]."""
    return re.sub(r"\(\?:(\[[^]]*\])\)\{2,2\}", r"\1\1", expression)


def test_comparing_names_is_bounded() -> None:
    with pytest.raises(UnsupportedPattern):
        Pattern("^(a?b?){99}$", pattern_steps(1_000)).matches("ab" * 60)


@pytest.mark.parametrize("letter", "dws")
def test_the_classes_are_pythons_own(letter: str) -> None:
    own = {chr(code) for low, high in character_class(letter, "python") for code in range(low, high + 1)}
    tested = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")]
    assert own == {each for each in tested if re.match(rf"\{letter}", each)}


LENGTHS = {"minLength": 1, "maxLength": 3}


@pytest.mark.parametrize("others", [LENGTHS, {"allOf": [{"pattern": "^[^b]*$"}]}, {"enum": ["a", "b"], **LENGTHS}])
def test_beside_other_keywords_a_pattern_is_held_too(others: dict[str, object]) -> None:
    schema = {"type": "string", "pattern": '^[^"\\\\]*$', **others}
    assert takes(schema, '"a"')
    for text in ('"\\""', '"\\\\"'):
        assert not takes(schema, text)
    for text in answers(schema, 20):
        Draft202012Validator(schema).validate(json.loads(text))
