"""Lark grammars as regular expressions, which a worker can enforce within a JSON string."""

import re

import pytest

from sluice.interfaces.lark import lark_pattern
from tests.gateway.responses.codex import PATCH_GRAMMAR
from worker.text.grammar.schema.patterns import Pattern

PATCH = '*** Begin Patch\n*** Add File: a.txt\n+"hi"\n+\n*** Delete File: b\n*** End Patch\n'


@pytest.mark.parametrize(
    ("definition", "texts", "others"),
    [
        (PATCH_GRAMMAR, [PATCH, PATCH[:-1]], ["", PATCH[1:], PATCH.replace("+", "-")]),
        ('start: "a.b" | "c"', ["a.b", "c"], ["a-b", "a.bc"]),
        ('start: ("a" | b)~2..3 [c]\nb: "B"\nc: /x{2}/', ["aB", "aaaxx"], ["a", "aax", "aaaa"]),
        ('start: "a".."f"+ INT\n%import common.INT', ["ab12"], ["g1", "a"]),
        ('?start: WORD // a comment\n     | "\\"" -> quoted\nWORD.2: /[a-z\\/]+/', ["ab/c", '"'], ["//1", "A"]),
        ('start: "\\n" "-".."]" "ö"', ["\n]ö", "\n-ö"], ["n]ö"]),
    ],
)
def test_the_expression_matches_the_texts_of_the_grammar(definition: str, texts: list[str], others: list[str]) -> None:
    pattern = lark_pattern(definition)
    assert pattern is not None
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert not any(re.fullmatch(pattern, text) for text in others)
    accepted = Pattern(f"^(?:{pattern})$")
    assert [accepted.matches(text) for text in (*texts, *others)] == [True] * len(texts) + [False] * len(others)


@pytest.mark.parametrize(
    "definition",
    [
        'start: "a" start?',
        "start: a\na: b\nb: a",
        "start: a",
        "begin: /a/",
        "start: /a/i",
        'start: "a"i',
        'start: "a"i\ni: "b"',
        'start: /a/s\ns: "b"',
        "start: ( /a/",
        "start: /a/ )",
        "start:",
        "start: /a/ /b/\n%ignore /c/",
        'start: "a"\n%import common.SQL_COMMENT',
        "start{x}: x",
        "",
        "start: " + "(" * 5000,
        "start: a0\n" + "\n".join(f"a{k}: a{k + 1} a{k + 1}" for k in range(60)) + '\na60: "a"',
        "start: " + "|".join(["a"] * 30_000) + "\na: /" + "b" * 10_000 + "/",
    ],
)
def test_a_grammar_without_an_expression_has_none(definition: str) -> None:
    assert lark_pattern(definition) is None
